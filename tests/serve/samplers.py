"""A sampler that runs in a thread of the test's process."""

import contextlib
import threading

from posttrain.serve import app, sampler


@contextlib.contextmanager
def running(port=0, api_key=None):
  """Yields (address, sampler); the server ends with the block."""
  with contextlib.closing(app.bind('127.0.0.1', port)) as listening:
    decoder = sampler.Sampler()
    hosts = app.own_hosts(listening)
    server = app.Server(decoder.application(api_key, hosts), decoder)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
      yield app.address(listening), decoder
    finally:
      server.leave()
      thread.join()
