"""On-policy distillation: a teacher scores the student's tokens."""

from posttrain.algorithms import base


class Opd(base.Algorithm):
  """Policy gradient of the reverse KL to a frozen teacher q.

      loss = sum_t KL(pi(. | <t) || q(. | <t)) / N_ref_kl    over sampled tokens

  estimated at the sampled token, with log q - log pi as its credit
  (`losses.ref_kl`). No reward is read. The teacher must have the same
  tokenizer; it may be another model, or an endpoint.

  Streams: `ref_kl_weights = 1` on the completion mask, `ref_logprobs` of the
  teacher at the sampling temperature; no credit. With a teacher equal to the
  policy, value and gradient are 0.

  References:
    Lu and Thinking Machines Lab, "On-Policy Distillation", 2025. Agarwal et
    al., "On-Policy Distillation of Language Models", arXiv 2306.13649.
  """

  component = 'ref_kl'
