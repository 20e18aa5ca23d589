"""Networks of a user for `allstep forecast --model`."""


def convolutions(input_shape, num_classes):
    import torch

    return torch.nn.Sequential(
        torch.nn.Conv2d(input_shape[2], 8, 3, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(num_classes),
    )


def numbers(input_shape, num_classes):
    import torch

    return torch.nn.Linear(*input_shape, num_classes)


def scaled(input_shape, num_classes):
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(num_classes))
            self.output = torch.nn.Linear(*input_shape, num_classes)

        def __call__(self, numbers):  # torch calls no hook of such a module
            return self.output(numbers) * self.scale

    return Scaled()


def text(input_shape, num_classes):
    import torch

    class Text(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.output = torch.nn.Linear(8, 100)  # listed first, computed last, tied to the embeddings
            self.tokens = torch.nn.Embedding(100, 8)
            self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
            self.output.weight = self.tokens.weight

        def forward(self, tokens):
            return {"logits": self.output(self.frozen(self.block(self.tokens(tokens))))}

    return Text()


def attention(input_shape, num_classes):
    import keras

    tokens = keras.Input(input_shape)
    hidden = keras.layers.Embedding(100, 8)(tokens)
    hidden = keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = keras.layers.Dense(8, trainable=False)(hidden)
    return keras.Model(tokens, keras.layers.Dense(num_classes)(keras.layers.Flatten()(hidden)))


def weightless(input_shape, num_classes):
    import torch

    return torch.nn.ReLU()


def failing(input_shape, num_classes):
    raise RuntimeError("no such file")
