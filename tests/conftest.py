"""One pytest process imports both frameworks: TensorFlow after Triton, since the other order crashes the process."""

import torch._dynamo  # noqa: F401 (torch.optim would import it, and Triton with it, after TensorFlow)
