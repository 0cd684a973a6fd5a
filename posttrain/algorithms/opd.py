"""On-policy distillation: a teacher scores the student's tokens."""

from posttrain.algorithms import base


class Opd(base.Algorithm):
  """Policy gradient of the reverse KL to a frozen teacher q.

      loss = w sum_t KL(pi(. | <t) || q(. | <t)) / N    over N sampled tokens

  estimated at the sampled token, with log q - log pi as its credit
  (`losses.ref_kl`). No reward is read. The teacher must have the same
  tokenizer; it may be another model, or an endpoint.

  Streams: `ref_kl_weights = w`, the option `weight`, on the completion mask;
  `ref_logprobs` of the teacher at the sampling temperature; no credit. KL
  penalties of other environments have a mean of their own, for which a step
  with both scales the weights (`streams.apart`).
  With a teacher equal to the policy, value and gradient are 0.

  References:
    Lu and Thinking Machines Lab, "On-Policy Distillation", 2025. Agarwal et
    al., "On-Policy Distillation of Language Models", arXiv 2306.13649.
  """

  component = 'ref_kl'
