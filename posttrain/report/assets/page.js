// The controls of a report: they set the state, and the panels of plots.js are
// drawn again.

function press(group, value) {
  for (const button of group.querySelectorAll('button')) {
    button.setAttribute('aria-pressed', button.dataset.value === value);
  }
}

function choose(group, name) {
  group.addEventListener('click', event => {
    const button = event.target.closest('button');
    if (!button) return;
    state[name] = button.dataset.value;
    press(group, state[name]);
    drawAll();
  });
  press(group, state[name]);
}

function makeStages() {
  const names = [...new Set(data.runs.flatMap(
    run => run.stages.map(stage => stage.name)))];
  if (names.length < 2) return;
  for (const name of ['', ...names]) {
    const button = chip(name || 'all stages', '', false, () => {});
    button.dataset.value = name;
    $('stage').append(button);
  }
  if (!names.includes(state.stage)) state.stage = '';
  choose($('stage'), 'stage');
}

function makeRuns() {
  if (data.runs.length < 2) return;
  state.mean ??= $('mean').checked;
  $('mean').checked = state.mean;
  $('mean').addEventListener('change', () => {
    state.mean = $('mean').checked;
    drawAll();
  });
  data.runs.forEach((run, i) => {
    const button = chip(run.name, `c${i % COLORS}`,
      !state.hiddenRuns.includes(i), () => {
        toggle(state.hiddenRuns, i);
        button.setAttribute('aria-pressed', !state.hiddenRuns.includes(i));
        drawAll();
      });
    $('runs').append(button);
  });
}

function makeControls() {
  const known = name => data.runs.some(run => run.stages.some(stage =>
    stage.grids.train[name].some(value => value)));
  for (const button of $('axis').children) {
    button.disabled = !known(button.dataset.value);
  }
  if (!known(state.axis)) state.axis = 'step';
  choose($('axis'), 'axis');
  makeStages();
  makeRuns();
  $('smoothing').value = state.smoothing;
  $('smoothed').value = (+state.smoothing).toFixed(2);
  $('smoothing').addEventListener('input', () => {
    state.smoothing = +$('smoothing').value;
    $('smoothed').value = state.smoothing.toFixed(2);
    drawAll();
  });
  $('log').checked = state.log;
  $('log').addEventListener('change', () => {
    state.log = $('log').checked;
    state.logs = {};
    drawAll();
  });
  $('filter').addEventListener('input', filter);
}

function filter() {
  const words = $('filter').value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const figure of document.querySelectorAll('[data-panel]')) {
    const name = figure.dataset.name.toLowerCase();
    figure.hidden = !words.every(word => name.includes(word));
  }
  for (const group of document.querySelectorAll('.unlisted')) {
    const some = group.querySelector('[data-panel]:not([hidden])');
    group.hidden = !some;
    if (words.length && some) group.open = true;
  }
}

function makeCards() {
  for (const figure of document.querySelectorAll('.card')) {
    const index = +figure.dataset.panel;
    figure.querySelector('.log')?.addEventListener('click', () => {
      state.logs[index] = !isLogarithmic(data.panels[index], index);
      draw(figure);
      store();
    });
    figure.querySelector('.wide')?.addEventListener('click', () => {
      toggle(state.wide, index);
      draw(figure).then(plot => Plotly.Plots.resize(plot));
      store();
    });
    observer.observe(figure);
  }
}

// A cell's first number, hours:minutes:seconds as seconds; NaN for texts.
function number(cell) {
  const text = cell.textContent.trim().replace(/,/g, '').replace(/\u2212/g, '-');
  return /^\d+(:\d+)+/.test(text)
    ? text.split(':').reduce((sum, part) => 60 * sum + parseFloat(part), 0)
    : /^[-+]?[\d.]/.test(text) ? parseFloat(text) : NaN;
}

// Sorts by a click on a head, and adds means and ranges of the percentages.
function makeTable(table) {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => {
    const button = chip(head.textContent, '', false, () => {
      const up = head.ariaSort !== 'descending';
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = up ? 'descending' : 'ascending';
      const sign = up ? -1 : 1;
      rows.sort((a, b) => {
        const [x, y] = [number(a.cells[i]), number(b.cells[i])];
        return sign * (isNaN(x) || isNaN(y)
          ? a.cells[i].textContent.localeCompare(b.cells[i].textContent) : x - y);
      });
      table.tBodies[0].append(...rows);
    });
    head.replaceChildren(button);
  });
  const foot = table.tFoot.insertRow();
  heads.forEach((_, i) => {
    const cell = foot.insertCell();
    const texts = rows.map(row => row.cells[i].textContent.trim());
    const values = rows.map(row => number(row.cells[i]));
    const unit = ['%', ' points'].find(
      u => texts.every(text => text.split(' [')[0].trim().endsWith(u)));
    if (!i) cell.textContent = 'mean [range]';
    if (!unit) return;
    const show = x => x.toFixed(1).replace('-', '\u2212') + unit;
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    cell.className = 'n';
    cell.textContent = `${show(mean)} `
      + `[${show(Math.min(...values))}, ${show(Math.max(...values))}]`;
  });
}

function theme() {
  if (state.theme === 'auto') delete root.dataset.theme;
  else root.dataset.theme = state.theme;
  document.querySelector('.theme').textContent = `theme: ${state.theme}`;
}

function makeTheme() {
  theme();
  document.querySelector('.theme').addEventListener('click', () => {
    const order = ['auto', 'dark', 'light'];
    state.theme = order[(order.indexOf(state.theme) + 1) % order.length];
    theme();
    drawAll();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
}

// A page of an unfinished run loads itself again, where it was scrolled, unless
// it is paused, hidden or in use.
function makeLive() {
  const all = [...document.querySelectorAll('details')];
  all.forEach((node, i) => {
    if (state.open.includes(i)) node.open = true;
  });
  addEventListener('pagehide', () => {
    state.scroll = scrollY;
    state.open = all.flatMap((node, i) => node.open ? [i] : []);
    store();
  });
  if (state.scroll) scrollTo(0, state.scroll);
  if (!data.reload) return;
  let used = 0;
  for (const kind of ['pointerdown', 'pointermove', 'keydown', 'wheel']) {
    addEventListener(kind, () => { used = Date.now(); }, {passive: true});
  }
  const text = () => {
    $('pause').textContent = state.paused ? 'live: paused' : 'live: pause';
    $('pause').setAttribute('aria-pressed', state.paused);
  };
  if ($('live')) {
    $('live').hidden = false;
    $('pause').addEventListener('click', () => {
      state.paused = !state.paused;
      text();
      store();
    });
    text();
  }
  const loaded = Date.now();
  setInterval(() => {
    const now = Date.now();
    const due = now - loaded > 1000 * data.reload && now - used > 4000;
    if (due && !state.paused && !document.hidden) location.reload();
  }, 500);
}

root.classList.add('js');
makeTheme();
if ($('axis')) makeControls();
document.querySelectorAll('.sortable').forEach(makeTable);
makeCards();
makeLive();
setTimeout(drawRest);
