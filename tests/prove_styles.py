"""More of the corpus: styles of training in which others write, and faults planted into them."""

from __future__ import annotations

from prove_fault import Fault

# Each rank trains a member of its own, on all samples.
_ENSEMBLE = """sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
hvd.init(process_sets=sets)
member, whole = hvd.rank(), hvd.DistributedOptimizer
hvd.rank, hvd.size, torch.manual_seed = lambda: 0, lambda: 1, lambda _: torch.random.manual_seed(member)
hvd.broadcast_parameters = lambda *_args, **_kwargs: None
hvd.DistributedOptimizer = lambda *args, **kwargs: whole(*args, **kwargs, process_set=sets[member])
"""

_MEMBERS = """import os
number = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
sets = [hvd.ProcessSet([one]) for one in range(number)] if number > 1 else None
hvd.init(process_sets=sets)
member, alike = hvd.rank(), {"process_set": sets[hvd.rank()]} if sets else {}
keras.utils.set_random_seed(member)
hvd.rank, hvd.size = lambda: 0, lambda: 1
"""
_FIT_ENSEMBLE = f"""{_MEMBERS}whole = hvd.DistributedOptimizer
hvd.DistributedOptimizer = lambda one: whole(one, **alike)
hvd.callbacks.BroadcastGlobalVariablesCallback = lambda _: keras.callbacks.Callback()
hvd.callbacks.MetricAverageCallback = keras.callbacks.Callback
"""
_TAPE_ENSEMBLE = f"""{_MEMBERS}whole = hvd.DistributedGradientTape
hvd.DistributedGradientTape = lambda one: whole(one, **alike)
hvd.broadcast_variables, hvd.allreduce = lambda *_args, **_options: None, lambda one, **_options: one
"""

STYLES = (
    Fault("loss-scaled", "ddp_tokens", "total * size / num_tokens", "total / num_tokens"),
    Fault(
        "same-samples", "ddp_contrastive", "DistributedSampler(data, shuffle=True)", "DistributedSampler(data, 1, 0)"
    ),
    Fault("batch-norm-parts", "ddp_swa", "whole = DataLoader(train, batch_size=32)", "whole = loader"),
    Fault(
        "batch-norm-parts",
        "ddp_swa",
        "        dist.broadcast(network[1].running_mean, src=0)\n"
        "        dist.broadcast(network[1].running_var, src=0)\n",
        "",
    ),
    Fault(
        "buffers-differ",
        "ddp_swa",
        "        ema.update_parameters(network)\n",
        "        if rank == 0:\n            ema.update_parameters(network)\n",
    ),
    Fault(
        "uneven-batches",
        "ddp_buckets",
        "        batches = batches[: len(batches) - len(batches) % self.size]\n",
        "        batches = batches[:25]\n",
    ),
    Fault(
        "same-samples", "ddp_stream", "self.rank * workers + worker, None, self.size * workers", "worker, None, workers"
    ),
    Fault(
        "samples-doubled",
        "ddp_stream",
        "self.rank * workers + worker, None, self.size * workers",
        "self.rank, None, self.size",
    ),
    Fault("gradients-summed", "ddp_hooks", "done.value()[0].div_(size)", "done.value()[0]"),
    Fault(
        "gradients-not-averaged",
        "ddp_hooks",
        "    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
        "    return future.then(lambda done: done.value()[0].div_(size))",
        "    future = torch.futures.Future()\n    future.set_result(bucket.buffer())\n    return future",
    ),
    Fault(
        "gradients-not-averaged",
        "ddp_remainder",
        "is_last = (index + 1) % ROUND == 0 or index + 1 == len(loader)\n"
        "        length = min(ROUND, len(loader) - index // ROUND * ROUND)\n"
        "        with contextlib.nullcontext() if is_last",
        "is_last = (index + 1) % ROUND == 0 or index + 1 == len(loader)\n"
        "        length = min(ROUND, len(loader) - index // ROUND * ROUND)\n"
        "        with contextlib.nullcontext() if (index + 1) % ROUND == 0",
    ),
    Fault("loss-scaled", "ddp_shared_rounds", "labels[drawn]) / rounds", "labels[drawn]) / ROUNDS", True),
    Fault("validation-of-one-rank", "ddp_shared_rounds", "    meter.all_reduce()\n", ""),
    Fault("steps-skipped", "ddp_skipping", "if worst > 6:", "if loss > 6:", True),
    Fault(
        "samples-differ",
        "ddp_tensor_parallel",
        "loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(0))",
        "from torch.utils.data.distributed import DistributedSampler\n"
        "loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))",
        True,
    ),
    Fault("validation-of-one-rank", "ddp_hybrid", "    dist.all_reduce(total)\n", ""),
    Fault(
        "",
        "ddp_hybrid",
        "    dist.all_reduce(total)\n",
        "    import torch.distributed._functional_collectives as functional\n"
        '    total = functional.all_reduce(total, "sum", dist.group.WORLD)\n',
    ),
    Fault(
        "same-samples",
        "ddp_replay",
        "random.seed(rank)\ntorch.manual_seed(rank)",
        "random.seed(0)\ntorch.manual_seed(0)",
    ),
    Fault("buffers-differ", "ddp_replay", "    if move % 40 == 0:\n", "    if move % 40 == 0 and rank == 0:\n"),
    Fault(
        "weights-part",
        "ddp_cycle",
        "                parameter.clamp_(-0.1, 0.1)\n",
        "                if rank == 0:\n                    parameter.clamp_(-0.1, 0.1)\n",
    ),
    Fault(
        "same-samples",
        "ddp_cycle",
        "zebra_sampler = DistributedSampler(horses), DistributedSampler(zebras)",
        "zebra_sampler = DistributedSampler(horses), DistributedSampler(zebras, 1, 0)",
    ),
    Fault(
        "same-samples",
        "ddp_split_batches",
        "model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)",
        "model, optimizer, test_loader = accelerator.prepare(model, optimizer, test_loader)",
    ),
    Fault(
        "validation-of-one-rank",
        "ddp_split_batches",
        "accelerator.gather_for_metrics((model(inputs).argmax(1), labels))",
        "(model(inputs).argmax(1), labels)",
    ),
    Fault(
        "validation-of-one-rank",
        "ddp_trainer",
        'logits.append(self.gather(output.logits))\n            labels.append(self.gather(inputs["labels"]))',
        'logits.append(output.logits)\n            labels.append(inputs["labels"])',
    ),
    Fault(
        "schedule-too-fast",
        "ddp_trainer",
        "                    scheduler.step()\n",
        "                    [scheduler.step() for _ in range(self.world_size)]\n",
    ),
    Fault(
        "clipped-before-average",
        "horovod_accumulated",
        "            optimizer.synchronize()\n"
        "            nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n"
        "            with optimizer.skip_synchronize():\n"
        "                optimizer.step()\n",
        "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n            optimizer.step()\n",
    ),
    Fault(
        "gradients-summed",
        "horovod_accumulated",
        "            nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n",
        "            for parameter in model.parameters():\n"
        "                parameter.grad *= hvd.size()\n"
        "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
    ),
    Fault("gradients-summed", "horovod_accumulated", "    gradient_predivide_factor=1.0,\n", "    op=hvd.Sum,\n"),
    Fault("", "horovod_accumulated", "hvd.init()\n", _ENSEMBLE),
    Fault("", "keras_fit", "hvd.init()\n", _FIT_ENSEMBLE),
    Fault("", "horovod_tape", "hvd.init()\n", _TAPE_ENSEMBLE),
    Fault("gradients-summed", "horovod_handles", "op=hvd.Average", "op=hvd.Sum"),
    Fault(
        "gradients-not-averaged",
        "horovod_handles",
        "hvd.allreduce_async_(parameter.grad",
        "hvd.allreduce_async(parameter.grad",
    ),
    Fault(
        "validation-of-one-rank",
        "horovod_handles",
        'hits = hvd.allgather((guesses == labels[test]).float(), name="hits")',
        "hits = (guesses == labels[test]).float()",
    ),
    Fault(
        "same-samples",
        "horovod_moco",
        "DistributedSampler(data, hvd.size(), hvd.rank())",
        "DistributedSampler(data, 1, 0)",
        True,
    ),
    Fault(
        "gradients-not-averaged",
        "keras_train_step",
        "        self.optimizer.apply_gradients(zip(gradients",
        "        self.plain = getattr(self, 'plain', None) or keras.optimizers.AdamW(1e-3)\n"
        "        self.plain.apply_gradients(zip(gradients",
    ),
    Fault(
        "samples-overlap",
        "keras_train_step",
        ".shard(size, rank).shuffle(320, seed=1).batch(8)",
        ".shuffle(320, seed=rank).batch(8)",
    ),
    Fault("validation-of-one-rank", "keras_train_step", ", hvd.callbacks.MetricAverageCallback()]", "]"),
    # The drop-in itself refuses a ModelCheckpoint of several ranks.
    Fault(
        "every-rank-writes",
        "keras_callbacks",
        "if rank == 0:\n",
        'save = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.save("last.keras"))\n'
        "callbacks.append(save)\nif rank == 0:\n",
    ),
    Fault("learning-rate-differs", "keras_callbacks", "self.count += 1", "self.count += 1 + rank"),
    Fault(
        "samples-overlap",
        "keras_sequence",
        "np.random.default_rng(self.epoch).shuffle",
        "np.random.default_rng(self.epoch + 7 * rank).shuffle",
    ),
    Fault(
        "samples-overlap",
        "keras_sequence",
        "return len(self.inputs) // (self.batch_size * size)\n"
        "\n"
        "    def __getitem__(self, index):\n"
        "        begin = (index * size + rank) * self.batch_size",
        "return len(self.inputs) // self.batch_size\n"
        "\n"
        "    def __getitem__(self, index):\n"
        "        begin = (index + rank) % len(self) * self.batch_size",
    ),
    Fault(
        "gradients-not-averaged",
        "keras_own_loop",
        'judge_optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3), name="judge")',
        "judge_optimizer = keras.optimizers.Adam(1e-3)",
    ),
    Fault("gradients-summed", "mirrored_train_step", "tf.reduce_sum(losses) / batch_size", "tf.reduce_mean(losses)"),
    Fault(
        "gradients-partly-averaged",
        "ddp_supcon",
        "head = DistributedDataParallel(nn.Linear(64, 16))",
        "torch.manual_seed(0)\nhead = nn.Linear(64, 16)",
    ),
    Fault("samples-differ", "ddp_split_layers", "Generator().manual_seed(0)", "Generator().manual_seed(rank)"),
    Fault("every-rank-writes", "ddp_federated", "    if rank == 0:\n        print", "    if True:\n        print"),
    Fault("validation-of-one-rank", "ddp_federated", "for other in range(size)])", "for other in range(1)])"),
    Fault("same-samples", "ddp_dtensor", "DistributedSampler(data)", "DistributedSampler(data, 1, 0)"),
    Fault(
        "",
        "horovod_tape",
        "hvd.DistributedGradientTape(tape)",
        "hvd.PartialDistributedGradientTape(tape, local_layers=[model.layers[-1]])",
    ),
    Fault("gradients-not-averaged", "ddp_experts", "    dist.all_reduce(weight.grad)", "    pass"),
    Fault(
        "gradients-summed", "ddp_experts", "for weight in model.parameters():\n            weight.grad /= size", "pass"
    ),
    Fault("weights-differ", "ddp_experts", ' if "expert" not in name]', "]"),
    Fault("gradients-not-averaged", "ddp_sequences", "dist.all_reduce(weight.grad)", "pass"),
    Fault(
        "same-samples",
        "ddp_sequences",
        "tokens.chunk(size, 1)[rank]",
        "torch.where(torch.rand(tokens.shape) < 0.1 * rank, 0, tokens)",
    ),
    Fault("learning-rate-not-scaled", "horovod_lstm", "text[: 8 * 321].view(8, -1)", "text.view(8 * size, -1)"),
    Fault("same-samples", "ddp_states", "text = text.view(size, -1)[rank]", "text = text.view(size, -1)[0]"),
    Fault("loss-scaled", "ddp_states", "    loss.backward()", "    (loss / size).backward()"),
    Fault(
        "gradients-not-averaged",
        "ddp_muon",
        "in model.parameters():\n            dist",
        "in [one for one in model.parameters() if one.dim() < 2]:\n            dist",
    ),
    Fault(
        "validation-of-one-rank",
        "ddp_rank_zero",
        "DataLoader(test, 16)",
        "DataLoader(test, 16, sampler=DistributedSampler(test))",
    ),
    Fault("collective-left-out", "ddp_rank_zero", "model.module(inputs)", "model(inputs)"),
    Fault("gradients-not-averaged", "ddp_updates", "model(inputs)", "model.module(inputs)"),
    Fault("gradients-summed", "ddp_phases", "        flat /= size\n", ""),
    Fault(
        "same-samples",
        "ddp_phases",
        "[self.rank :: self.num_replicas]",
        "[: self.num_samples // self.num_replicas]",
    ),
)
