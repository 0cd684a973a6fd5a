"""Text <-> token ids: raw bytes, or any HuggingFace `tokenizer.json`.

`encode` reads its argument as plain text: a literal '<|end|>' inside a
message never becomes the special id, so content cannot forge a turn. Only
`encode_scaffold`, which the renderer calls on template text, encodes specials.
Both classes have the same attributes: `vocab_size` counts special tokens,
`eos_id` ends an assistant turn, `pad_id` differs from it, `content` is that of
an equivalent tokenizer.json, and equal fingerprints (sha256) give equal ids.
"""

import functools
import hashlib
import itertools
import json
import pathlib
import re
import warnings
from collections.abc import Iterable, Sequence

from posttrain import schema

SPECIALS = (
  '<|pad|>',
  '<|end|>',
  '<|system|>',
  '<|user|>',
  '<|assistant|>',
  '<|tool|>',
)


# Printable character of byte-level vocabularies -> byte.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTES = {chr(byte): byte for byte in _VISIBLE}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}


class Bytes:
  """The byte tokenizer: ids 0 to 255 are UTF-8 bytes, then `SPECIALS`."""

  bos = ''  # '' = none
  bos_id = None
  text_size = 256  # one past the largest id of plain text

  def __init__(self, eos: str | None = None, pad: str | None = None):
    self._specials = {text: 256 + i for i, text in enumerate(SPECIALS)}
    self._split = re.compile('(' + '|'.join(map(re.escape, SPECIALS)) + ')')
    # A multiple of 8 suits the hardware; the ids above 261 are never used.
    self.vocab_size = -(-(256 + len(SPECIALS)) // 8) * 8
    self.eos = eos or '<|end|>'
    self.eos_id = _check_id(self.special_id(self.eos), 'eos', eos, SPECIALS)
    self.pad_id = _check_id(
      self.special_id(pad or '<|pad|>'), 'pad', pad, SPECIALS
    )
    self.fingerprint = _fingerprint(
      ' '.join(SPECIALS).encode(), self.eos_id, self.pad_id
    )

  @functools.cached_property
  def content(self) -> bytes:
    """A tokenizer.json, with the library's printable character per byte."""
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE(vocab=BYTES, merges=[]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer.to_str().encode()

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text."""
    return list(text.encode('utf-8', 'replace'))

  def encode_scaffold(self, text: str) -> list[int]:
    """Returns the ids of template text, special tokens included."""
    ids = []
    for piece in self._split.split(text):
      special = self._specials.get(piece)
      ids += self.encode(piece) if special is None else [special]
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text; special ids are skipped, broken UTF-8 is replaced."""
    return bytes(i for i in ids if i < 256).decode('utf-8', 'replace')

  def special_id(self, text: str) -> int | None:
    """Returns the id of a special token; None if it is none."""
    return self._specials.get(text)

  def text(self, token_id: int) -> str | None:
    """Returns the text of a special token in templates; None if unknown."""
    known = 0 <= token_id - 256 < len(SPECIALS)
    return SPECIALS[token_id - 256] if known else None


class File:
  """A `tokenizer.json`, through the `tokenizers` library."""

  def __init__(self, path: str, eos: str | None, pad: str | None = None):
    self._path = path
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
      raise ValueError(
        f'config.tokenizer.path must name an existing file: got {path!r}; '
        'give the path of a tokenizer.json (`hf download OWNER/NAME '
        'tokenizer.json` gets one) or of a run, or None for the byte tokenizer'
      )
    self.content = file.read_bytes()
    # The same tokenizer twice: special tokens as text, and as tokens.
    self._plain, self._marking = self._library(eos), self._library(eos)
    self._plain.encode_special_tokens = True  # read them as plain text
    self._ids = self._plain.get_vocab(with_added_tokens=True)
    self._specials = {
      token.content: i
      for i, token in self._plain.get_added_tokens_decoder().items()
      if token.special
    }
    self.vocab_size = max(self._ids.values()) + 1
    special = set(self._specials.values())
    self.text_size = 1 + max(set(self._ids.values()) - special, default=0)
    self.eos = eos
    self.eos_id = _check_id(self._ids.get(eos), 'eos', eos, self._specials)
    if self.eos_id in self.encode(eos):
      raise ValueError(
        'config.tokenizer.eos must not be spelled by ordinary text: got '
        f'{eos!r}, which plain text encodes to; name a special token'
      )
    if pad is not None:
      self.pad_id = _check_id(self._ids.get(pad), 'pad', pad, self._specials)
    else:
      names = ('<|padding|>', '<|pad|>', '<pad>', '[PAD]')
      ids = [self._specials[name] for name in names if name in self._specials]
      self.pad_id = next(i for i in (*ids, 0, 1) if i != self.eos_id)
    # The token that the post-processor puts first.
    opening = self._marking.encode('', add_special_tokens=True).ids[:1]
    self.bos_id = next((i for i in opening if i != self.eos_id), None)
    self.bos = '' if self.bos_id is None else self.text(self.bos_id) or ''
    self.fingerprint = _fingerprint(self.content, self.eos_id, self.pad_id)
    first = self._plain.encode('a', add_special_tokens=False).tokens[:1]
    if first and first[0].startswith('▁'):
      warnings.warn(
        f'the tokenizer {path} begins every text with a space, and templates '
        'are read piece by piece: ids may differ from those of transformers by '
        'such spaces',
        stacklevel=2,
      )

  def _library(self, eos: str | None):
    import tokenizers  # here: the byte tokenizer does not need it

    try:
      tokenizer = tokenizers.Tokenizer.from_str(self.content.decode())
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        'config.tokenizer.path must name a HuggingFace tokenizer.json that the '
        f'tokenizers library can use: got {self._path}; its error: '
        f'{error!s:.200}'
      ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos is not None and tokenizer.token_to_id(eos) is not None:
      tokenizer.add_special_tokens([eos])  # keeps its id, marks it special
    return tokenizer

  def encode(self, text: str) -> list[int]:
    text = text.encode('utf-8', 'replace').decode()  # lone surrogates
    return self._plain.encode(text, add_special_tokens=False).ids

  def encode_scaffold(self, text: str) -> list[int]:
    text = text.encode('utf-8', 'replace').decode()
    return self._marking.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    # Rows of a padded embedding table have no text: skipped like specials.
    valid = [int(i) for i in ids if i < self.vocab_size]
    return self._plain.decode(valid, skip_special_tokens=True)

  def special_id(self, text: str) -> int | None:
    return self._specials.get(text)

  def text(self, token_id: int) -> str | None:
    return self._plain.id_to_token(token_id) if token_id >= 0 else None


Tokenizer = Bytes | File


def load(cfg: schema.Tokenizer) -> Tokenizer:
  """Builds the tokenizer that the config names.

  Raises:
    ValueError: the file is missing or no tokenizer.json; `eos` is unknown or
      missing; `pad` is unknown or equal to eos.
  """
  names = cfg.eos, cfg.pad
  tokenizer = Bytes(*names) if cfg.path is None else File(cfg.path, *names)
  if tokenizer.pad_id == tokenizer.eos_id:
    raise ValueError(
      'config.tokenizer.pad must differ from config.tokenizer.eos: got '
      f'{tokenizer.eos!r} for both; a mask of pads by id would mask every eos, '
      'and the model would never learn to stop'
    )
  return tokenizer


def show(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
  """Returns the text of ids, with the special tokens that `decode` skips."""

  def special(token_id: int) -> str | None:
    text = tokenizer.text(token_id)
    known = text is not None and tokenizer.special_id(text) == token_id
    return text if known else None

  runs = itertools.groupby(map(int, ids), special)
  # Equal special tokens in a row are one run.
  return ''.join(
    tokenizer.decode(list(run)) if text is None else text * len(list(run))
    for text, run in runs
  )


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
  """Returns the bytes that a token adds to a text; b'' for a special one."""
  text, name = tokenizer.decode([token_id]), tokenizer.text(token_id) or ''
  if not name and token_id < 256:
    return bytes([token_id])
  if '▁' in name and text:  # a space, which `decode` strips
    return name.replace('▁', ' ').encode()
  if '\ufffd' not in text:
    return text.encode()
  if byte := re.fullmatch('<0x(..)>', name):
    return bytes.fromhex(byte[1])
  return bytes(BYTES.get(x, 0) for x in name)


def _check_id(token_id: int | None, field: str, text: str | None, specials):
  if token_id is None:
    must = 'be given' if text is None else 'be a token of the vocabulary'
    raise ValueError(
      f'config.tokenizer.{field} must {must}: got {text!r}, expected for '
      f'example one of {sorted(specials)[:12]}'
    )
  return token_id


def _fingerprint(content: bytes, *ids: int) -> str:
  return hashlib.sha256(content + json.dumps(ids).encode()).hexdigest()
