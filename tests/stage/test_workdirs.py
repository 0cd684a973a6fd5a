"""What is in the way of a run's files, and reports that fail."""

import os

import pytest

from posttrain import main
from posttrain.stage import progress, workdirs
from tests.stage import test_progress


@pytest.mark.parametrize('name', workdirs.FILES)
@pytest.mark.parametrize('kind', ['folder', 'link', 'pipe', 'broken link'])
def test_what_is_no_file_of_the_workdir_is_refused_by_name(
  tmp_path, name, kind
):
  workdir, victim = tmp_path / 'run', tmp_path / 'victim'
  workdir.mkdir()
  victim.write_text('precious')
  path = workdir / name
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  else:
    path.symlink_to(victim if kind == 'link' else tmp_path / 'nowhere')
  with pytest.raises(ValueError, match=f'{path} must be a file') as error:
    main.claim(str(workdir), test_progress.run_of())
  assert '\n' not in str(error.value)
  assert victim.read_text() == 'precious'
  assert os.listdir(workdir) == [name]


@pytest.mark.parametrize('name', [*workdirs.FOLDERS, 'checkpoints'])
def test_what_is_no_folder_is_refused_by_name(tmp_path, name):
  (tmp_path / name).write_text('x')
  with pytest.raises(ValueError, match=f'{name} must be a folder: got a file'):
    main.claim(str(tmp_path), test_progress.run_of())


def test_folders_may_be_links_within_and_checkpoints_anywhere(tmp_path):
  workdir, disk = tmp_path / 'run', tmp_path / 'disk'
  (workdir / 'parts').mkdir(parents=True)
  (disk / 'a').mkdir(parents=True)
  (workdir / 'rollouts').symlink_to('parts')
  (workdir / 'checkpoints').symlink_to(disk)
  main.claim(str(workdir), test_progress.run_of())
  (disk / 'b').write_text('x')
  with pytest.raises(ValueError, match='checkpoints/b must be a folder'):
    main.claim(str(workdir), test_progress.run_of())
  (disk / 'b').unlink()
  (workdir / 'rollouts').unlink()
  (workdir / 'rollouts').symlink_to(disk)
  with pytest.raises(ValueError, match='rollouts must be a folder in the work'):
    main.claim(str(workdir), test_progress.run_of())


def test_config_json_is_not_written_through_a_link(tmp_path):
  workdir, victim = tmp_path / 'run', tmp_path / 'victim'
  workdir.mkdir()
  victim.write_text('precious')
  (workdir / 'config.json.tmp').symlink_to(victim)
  progress.write_config(test_progress.run_of(), str(workdir))
  assert victim.read_text() == 'precious'
  assert os.listdir(workdir) == ['config.json']


def test_a_report_that_fails_is_a_warning(tmp_path, caplog):
  (tmp_path / 'report.html').mkdir()
  main._report(str(tmp_path))
  assert 'the run is finished, but its report could not' in caplog.text
  assert 'directory' in caplog.text
