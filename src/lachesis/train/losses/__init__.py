"""Losses and advantages as pure functions of tensors: logprobs, rewards and options in, a loss and its terms out."""
