"""The server's cost of a token, and of a chat, as requests grow: linear.

    python -m experiments.benchmarks.serve_curves

Prints three tables: a token of a text against the characters of the stop
strings, in process, where no bound is checked; the same for a stream of a
server process; and a chat of empty messages against their number, with the
model and without it.
"""

import pathlib
import statistics
import tempfile
import time

import httpx

from experiments.benchmarks import served
from posttrain.serve import detokenizer, stop_strings


def in_process() -> None:
  """Prints the cost of a token against the length of stop strings."""
  print('| characters of stop strings | us per token, alone |\n|---|---|')
  for size in (100, 1000, 10_000, 100_000):
    # The text is the beginning of all of them, so that each stays possible.
    stops = stop_strings.Strings(['a' * (size // 4 - 1) + x for x in 'bcde'])
    seconds = []
    for _ in range(3):
      choice = detokenizer.Detokenizer(lambda ids: bytes(ids).decode(), stops)
      begin = time.perf_counter()
      for _ in range(4000):
        choice.append([97], [0.0], None)
      seconds.append(time.perf_counter() - begin)
    print(f'| {size} | {1e6 * min(seconds) / 4000:.1f} |')


def stream(client: httpx.Client) -> None:
  """Prints the cost of a token of a stream."""
  body = served.body(
    prompt='ab', max_tokens=512, temperature=0, ignore_eos=True
  )
  text = client.post('/v1/completions', json=body).json()['choices'][0]['text']
  print(
    '\n| characters of stop strings | ms per token of a stream |\n|---|---|'
  )
  for size in (0, 100, 1000, 4000):
    stop = (text + 'z' * size)[: size // 2 - 1] + 'z' if size else None
    stops = stop and [stop, 'z' * (size - len(stop))]
    seconds = []
    for _ in range(5):
      begin = time.perf_counter()
      response = client.post(
        '/v1/completions', json={**body, 'stop': stops, 'stream': True}
      )
      seconds.append(time.perf_counter() - begin)
      assert '[DONE]' in response.text
    print(f'| {size} | {1e3 * statistics.median(seconds) / 512:.2f} |')


def chat(client: httpx.Client) -> None:
  """Prints the cost of a chat against the number of its messages."""
  print(
    '\n| messages | s per chat | ms per message | refused for its tokens, s |'
  )
  print('|---|---|---|---|')
  for count in (125, 250, 500, 1000, 2000, 4000):
    messages = [{'role': 'user', 'content': ''}] * count
    seconds = []
    # The second is refused after it is rendered: the cost without the model.
    for tokens in (1, 2**30):
      begin = time.perf_counter()
      response = client.post(
        '/v1/chat/completions',
        json=served.body(messages=messages, max_tokens=tokens),
      )
      seconds.append(time.perf_counter() - begin)
      status = 200 if tokens == 1 and 2 * count < 8190 else 400
      assert response.status_code == status, response.text
    per_message = 1e3 * seconds[0] / count
    print(
      f'| {count} | {seconds[0]:.2f} | {per_message:.2f} | {seconds[1]:.2f} |'
    )


def main() -> None:
  """Runs the command."""
  in_process()
  with tempfile.TemporaryDirectory() as folder:
    server = served.Server(
      pathlib.Path(folder), '--slots=4', '--max_model_len=8192'
    )
    try:
      with server.client() as client:
        stream(client)
        chat(client)
    finally:
      server.stop()


if __name__ == '__main__':
  main()
