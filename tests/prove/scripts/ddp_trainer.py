"""A trainer in the style of Hugging Face's: arguments, callbacks, a data collator, and metrics of gathered logits."""

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class TrainingArguments:
    output_dir: str = "out"
    learning_rate: float = 5e-4
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    num_train_epochs: int = 2
    warmup_ratio: float = 0.1
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.1
    seed: int = 42


class Callback:
    def on_log(self, logs):
        pass

    def on_epoch_end(self, trainer):
        pass


class PrintCallback(Callback):
    def on_log(self, logs):
        print(logs)


class SaveCallback(Callback):
    def on_epoch_end(self, trainer):
        os.makedirs(trainer.args.output_dir, exist_ok=True)
        torch.save(trainer.unwrapped.state_dict(), os.path.join(trainer.args.output_dir, "model.bin"))


class Texts(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 40, (count, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": int(self.ids[index, 0] > 19)}


def collate(features):
    ids = torch.stack([one["input_ids"] for one in features])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([one["labels"] for one in features]),
    }


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    def __init__(self, smoothing):
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 2)
        self.smoothing = smoothing

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.layer(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(hidden.mean(1))
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return Output(loss, logits)


class Trainer:
    def __init__(self, args, train_dataset, eval_dataset, callbacks=()):
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.unwrapped = Classifier(args.label_smoothing)
        self.model = DistributedDataParallel(self.unwrapped)
        torch.manual_seed(args.seed + self.rank)
        self.callbacks = callbacks if self.rank == 0 else ()
        decayed = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)

    def get_train_dataloader(self):
        sampler = DistributedSampler(self.train_dataset, seed=self.args.seed)
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=collate, drop_last=True)

    def get_eval_dataloader(self):
        sampler = DistributedSampler(self.eval_dataset, shuffle=False)
        return DataLoader(self.eval_dataset, 8, sampler=sampler, collate_fn=collate)

    def create_scheduler(self, num_steps):
        warmup = math.ceil(num_steps * self.args.warmup_ratio)

        def rise_and_fall(step):
            return min(step / max(1, warmup), max(0.0, (num_steps - step) / (num_steps - warmup)))

        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, rise_and_fall)

    def training_step(self, inputs):
        self.model.train()
        loss = self.model(**inputs).loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def gather(self, tensor):
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.cat(gathered)

    def evaluate(self):
        self.model.eval()
        logits, labels = [], []
        for inputs in self.get_eval_dataloader():
            with torch.no_grad():
                output = self.model(**inputs)
            logits.append(self.gather(output.logits))
            labels.append(self.gather(inputs["labels"]))
        guesses = torch.cat(logits).argmax(-1)
        return {"eval_accuracy": (guesses == torch.cat(labels)).float().mean().item()}

    def train(self):
        loader = self.get_train_dataloader()
        rounds = len(loader) // self.args.gradient_accumulation_steps
        scheduler = self.create_scheduler(rounds * self.args.num_train_epochs)
        for epoch in range(self.args.num_train_epochs):
            loader.sampler.set_epoch(epoch)
            total = 0.0
            for step, inputs in enumerate(loader):
                total += self.training_step(inputs)
                if (step + 1) % self.args.gradient_accumulation_steps == 0:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                    self.optimizer.step()
                    scheduler.step()
                    self.optimizer.zero_grad()
            logs = {"loss": self.gather(total[None]).mean().item() / rounds, **self.evaluate()}
            for callback in self.callbacks:
                callback.on_log(logs)
                callback.on_epoch_end(self)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(TrainingArguments(), Texts(320, 0), Texts(64, 1), [PrintCallback(), SaveCallback()]).train()
    dist.destroy_process_group()
