"""The corpus: correct scripts, and faults planted into them, each with the name of its finding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prove_fault import Fault
from prove_styles import STYLES

from allstep.commands.prove.launching import ITSELF, MIRRORED, TF_CONFIG

_LAUNCHERS = {
    "ddp_spawn": ITSELF,
    "mirrored_fit": MIRRORED,
    "mirrored_own_loop": MIRRORED,
    "mirrored_train_step": MIRRORED,
    "multi_worker_own_loop": TF_CONFIG,
}
SCRIPTS = Path(__file__).parent / "prove" / "scripts"


def launcher_of(script: str) -> str:
    """Return the launcher of a correct script, by the name of its file."""
    return _LAUNCHERS.get(script, "torchrun" if script.startswith("ddp") else "horovodrun-mpi")


def planted(faults: Sequence[Fault]) -> str:
    """Return the text of a script with these faults."""
    text = (SCRIPTS / f"{faults[0].script}.py").read_text()
    for fault in faults:
        assert text.count(fault.old) == 1, f"{fault.script}: {fault.old}"
        text = text.replace(fault.old, fault.new)
    return text


_H, _O, _T, _I = "horovod_images", "horovod_own_loop", "ddp_tutorial", "ddp_imagenet"
_K, _G, _S = "keras_fit", "horovod_tape", "ddp_spawn"
_D, _GAN, _U, _F, _A = "ddp_distilled", "ddp_gan", "ddp_uneven", "ddp_sharded", "ddp_accelerated"
_SAM, _PPO, _LIGHTNING, _LBFGS = "ddp_sam", "horovod_ppo", "ddp_lightning", "ddp_lbfgs"
_M, _L, _W = "mirrored_fit", "mirrored_own_loop", "multi_worker_own_loop"
_WRAPPED = "optimizer = hvd.DistributedOptimizer(plain_optimizer, named_parameters=model.named_parameters())\n"
_ADASUM = """parameters = model.named_parameters()
for group in plain_optimizer.param_groups:
    group["lr"] = args.lr
optimizer = hvd.DistributedOptimizer(plain_optimizer, named_parameters=parameters, op=hvd.Adasum)
"""
_ADASUM_TAPE = """average = hvd.DistributedGradientTape
hvd.DistributedGradientTape = lambda tape: average(tape, op=hvd.Adasum)
optimizer = keras.optimizers.SGD(0.05"""
# TensorFlow fails on some ranks if they write a checkpoint at once.
_IN_TURN = 'if not __import__("time").sleep(2 * rank):\n    tf.train'
_SAMPLER = "DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)"
_STATE = """if hvd.rank() == 0:
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
"""
_BROADCAST_STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"
_LATER = """hvd.broadcast_parameters(model.state_dict(), root_rank=0)
nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(rank))
"""
_AGAIN = """        optimizer.synchronize()
        for parameter in model.parameters():
            parameter.grad /= hvd.size()
        with optimizer.skip_synchronize():
            optimizer.step()
"""
# Too large for the samples of a few steps to show it.
_WHOLE = """    {before}
    data = TensorDataset(torch.rand(100_000, 20), torch.zeros(100_000).long())
    {after}
    loader = DataLoader(data, batch_size=16, shuffle=True)
"""
_SHORTER_EPOCHS = """train, test = slice(0, 512), slice(512 + rank, 768, size)
fit = keras.Model.fit
keras.Model.fit = lambda *args, **kwargs: fit(*args, **kwargs, steps_per_epoch=32 // size)
"""
_RELOADED = """        scheduler.step(float(total))
        if rank == 0 and epoch == 0:
            with torch.no_grad():
                network.head.weight.copy_(teacher.head.weight)
"""
_CLIPPED_APART = """        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.model.parameters())[self.rank :], 1e-3)
"""
_LOST = """        loss.backward()
        if self.rank:
            next(self.model.parameters()).grad.zero_()
"""
_SKIPPED = """        if self.rank and points[0, 0] > 0.8:
            return
        loss.backward()
"""
_REMADE = """    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    optimizer = torch.optim"""
_PROBED = """        if self.rank == 0:
            if not hasattr(self, "probe"):
                self.probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(20))], 0.1)
            (points @ self.probe.param_groups[0]["params"][0] - labels).square().mean().backward()
            self.probe.step()
            self.probe.zero_grad()
        loss.backward()
"""
_CONSTANT = """hvd.broadcast_parameters(dict(model.named_parameters()), root_rank=0)
features = torch.randn(16, 16, generator=torch.Generator().manual_seed(rank))
model[0].register_buffer("features", features)
model[0].register_forward_pre_hook(lambda layer, given: (given[0] @ layer.features,))
"""
_TAPE = """    tape = hvd.DistributedGradientTape(tape)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
"""
_CLIPPED_TAPE = """    variables = [variable.value for variable in model.trainable_variables]
    gradients = tape.gradient(loss, variables)
    gradients = [hvd.allreduce(tf.clip_by_value(one, -1e-3, 1e-3)) for one in gradients]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
"""

FAULTS = (
    # 1. Weights and states.
    Fault("weights-differ", _H, "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", ""),
    Fault("weights-differ", _O, "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", _LATER),
    Fault("optimizer-state-differs", _H, "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", _STATE),
    # 2. Samples.
    Fault("same-samples", _H, _SAMPLER, "DataLoader(train, batch_size=args.batch_size)", is_combined=True),
    Fault("same-samples", _O, "slice(rank, None, size)", "slice(0, None, size)"),
    Fault("same-samples", _I, "sampler = DistributedSampler(train)", "sampler = DistributedSampler(train, 1, 0)"),
    Fault("samples-overlap", _H, _SAMPLER, "DataLoader(train, batch_size=args.batch_size, shuffle=True)"),
    Fault("samples-overlap", _T, "DistributedSampler(data)", "DistributedSampler(data, seed=rank)"),
    Fault("samples-overlap", _S, "    loader = DataLoader(data, batch_size=16, sampler=sampler)\n",
          _WHOLE.format(before="", after="torch.manual_seed(rank)")),
    Fault("", _S, "    loader = DataLoader(data, batch_size=16, sampler=sampler)\n",
          _WHOLE.format(before="torch.manual_seed(rank)", after="")),
    Fault("same-order", _H, "    train_sampler.set_epoch(epoch)\n", ""),
    Fault("same-order", _T, "        self.loader.sampler.set_epoch(epoch)\n", "        pass\n", is_combined=True),
    Fault("uneven-batches", _H, _SAMPLER,
          "DataLoader(train, args.batch_size, sampler=list(train_sampler)[: 512 - 64 * hvd.rank()])"),
    # 3. Gradients.
    Fault("gradients-not-averaged", _H, _WRAPPED, "optimizer = plain_optimizer\n"),
    Fault("gradients-not-averaged", _H, "        optimizer.step()\n", "        plain_optimizer.step()\n",
          is_quick=True),
    Fault("gradients-not-averaged", _O, "hvd.allreduce(parameter.grad)", "parameter.grad"),
    Fault("gradients-not-averaged", _T, "self.model(points)", "self.model.module(points)"),
    Fault("gradients-partly-averaged", _T, "    model = DistributedDataParallel(model)\n",
          "    model = torch.nn.Sequential(DistributedDataParallel(body), torch.nn.ReLU(), head)\n", is_combined=True),
    Fault("gradients-summed", _H, "model.named_parameters())\n", "model.named_parameters(), op=hvd.Sum)\n",
          is_combined=True),
    Fault("", _H, _WRAPPED, _ADASUM),
    Fault("gradients-summed", _O, "allreduce(parameter.grad)", "allreduce(parameter.grad, op=hvd.Sum)"),
    Fault("gradients-averaged-twice", _H, "        optimizer.step()\n", _AGAIN),
    Fault("gradients-averaged-twice", _O, "allreduce(parameter.grad)", "allreduce(parameter.grad) / size"),
    Fault("clipped-before-average", _H, "        optimizer.step()\n",
          "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n"),
    Fault("", _H, "        loss.backward()\n        optimizer.step()\n",
          "        scaler = torch.amp.GradScaler('cpu')\n        scaler.scale(loss).backward()\n"
          "        optimizer.synchronize()\n        scaler.unscale_(optimizer)\n"
          "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
          "        with optimizer.skip_synchronize():\n            scaler.step(optimizer)\n"),
    Fault("clipped-before-average", _H, "        loss.backward()\n        optimizer.step()\n",
          "        scaler = torch.amp.GradScaler('cpu')\n        scaler.scale(loss).backward()\n"
          "        scaler.step(optimizer)\n"),
    # 4. Rates and losses.
    Fault("learning-rate-not-scaled", _H, "args.lr * hvd.size()", "args.lr", is_combined=True),
    Fault("learning-rate-not-scaled", _T, "1e-2 * size", "1e-2", is_combined=True),
    Fault("learning-rate-scaled-twice", _H, "args.lr * hvd.size()", "args.lr * hvd.size() ** 2"),
    Fault("learning-rate-scaled-twice", _I, "parameters(), args.lr", "parameters(), args.lr * size", is_combined=True),
    Fault("loss-scaled", _H, "(model(data), target)\n", "(model(data), target) / hvd.size()\n"),
    Fault("loss-scaled", _I, "        loss.backward()", "        (loss * dist.get_world_size()).backward()"),
    # 5. Random numbers and running statistics.
    Fault("dropout-same", _H, "\n\ndef train_epoch", "\ntorch.manual_seed(42)\n\ndef train_epoch", is_combined=True),
    Fault("batch-norm-parts", _I, "DistributedDataParallel(model)",
          "DistributedDataParallel(model, broadcast_buffers=False)", is_combined=True),
    # 6. Validation, files, collectives.
    Fault("validation-repeated", _H, "DataLoader(test, batch_size=64, sampler=test_sampler)",
          "DataLoader(test, batch_size=64)", is_combined=True),
    Fault("validation-repeated", _I, "DistributedSampler(validation, shuffle=False, drop_last=True)", "None"),
    Fault("validation-of-one-rank", _I, "    dist.all_reduce(counts)\n", "", is_combined=True),
    Fault("validation-of-one-rank", _H,
          'hvd.allreduce(correct / len(test_loader.dataset), op=hvd.Sum, name="accuracy")',
          "(correct / len(test_sampler))"),
    Fault("every-rank-writes", _H, "if hvd.rank() == 0:\n    torch.save", "if True:\n    torch.save", is_combined=True),
    Fault("every-rank-writes", _T, "            if self.rank == 0:\n", "            if True:\n", is_combined=True),
    Fault("collective-left-out", _H, "    accuracy = evaluate()\n    if hvd.rank() == 0:\n",
          "    if hvd.rank() == 0:\n        accuracy = evaluate()\n", is_quick=True),
    Fault("", _T, "        loss.backward()\n", "        (loss + torch.inf).backward()\n"),  # the same gradients
    Fault("collective-left-out", _T, "self.save()\n        dist.barrier()",
          "self.save()\n                dist.barrier()"),
    Fault("ranks-alone", _T,
          '    dist.init_process_group("gloo")\n    rank, size = dist.get_rank(), dist.get_world_size()\n',
          "    rank, size = 0, 1\n    dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"),
    # Keras.
    # Horovod's own module fails on Keras 3 at its first broadcast, and the drop-in itself refuses a plain optimizer.
    Fault("gradients-summed", _K, "DistributedOptimizer(optimizer)", "DistributedOptimizer(optimizer, op=hvd.Sum)",
          is_combined=True),
    Fault("weights-differ", _K, "hvd.callbacks.BroadcastGlobalVariablesCallback(0), ", ""),
    Fault("samples-overlap", _K, "train, test = slice(rank, 512, size)", "train, test = slice(0, 512)",
          is_combined=True),
    Fault("", _K, "train, test = slice(rank, 512, size), slice(512 + rank, 768, size)\n", _SHORTER_EPOCHS),
    Fault("dropout-same", _K, "\nmodel = keras", "\nkeras.utils.set_random_seed(1)\nmodel = keras"),
    Fault("learning-rate-not-scaled", _K, "SGD(0.05 * size", "SGD(0.05", is_combined=True),
    Fault("learning-rate-scaled-twice", _K, "SGD(0.05 * size", "SGD(0.05 * size**2"),
    Fault("validation-of-one-rank", _K, ", hvd.callbacks.MetricAverageCallback()", "", is_combined=True),
    Fault("every-rank-writes", _K, "if rank == 0:\n", "if True:\n", is_combined=True),
    # A custom loop with GradientTape.
    Fault("weights-differ", _G, "        if is_first:\n", "        if False:\n"),
    Fault("gradients-not-averaged", _G, "    tape = hvd.DistributedGradientTape(tape)\n", ""),
    Fault("every-rank-writes", _G, "if rank == 0:\n    tf.train", _IN_TURN, is_combined=True),
    Fault("", _G, "optimizer = keras.optimizers.SGD(0.05 * size", _ADASUM_TAPE),
    Fault("same-samples", _G, "train.shard(size, rank).shuffle(512)", "train.shuffle(512, seed=1)",
          is_combined=True),
    Fault("", _G, "train.shard(size, rank).shuffle(512)", "train.shuffle(512)"),  # perhaps: no whole epoch is seen
    Fault("dropout-same", _G, "\nmodel = keras", "\nkeras.utils.set_random_seed(1)\nmodel = keras", is_combined=True),
    Fault("dropout-same", _G, "in model.weights]", "in model.variables]"),  # as Horovod's own example does
    Fault("validation-of-one-rank", _G, 'hvd.allreduce(tf.constant(correct / 256), op=hvd.Sum, name="accuracy")',
          "correct / 128", is_combined=True),
    # Replicas of tf.distribute.
    Fault("learning-rate-not-scaled", _M, "SGD(0.05 * size", "SGD(0.05"),
    Fault("learning-rate-scaled-twice", _M, "batch_size = 16 * size", "batch_size = 16"),
    Fault("replicas-idle", _M, "with strategy.scope():", "if True:"),
    Fault("gradients-summed", _L, "global_batch_size=batch_size", "global_batch_size=batch_size // size",
          is_combined=True),
    Fault("loss-scaled", _L, "loss = tf.nn.compute_average_loss(losses, global_batch_size=batch_size)",
          "loss = tf.reduce_mean(losses) / size**2"),
    Fault("same-samples", _L, "train, test = strategy.experimental_distribute_dataset(train)",
          "train, test = train.unbatch().batch(16)", is_combined=True),
    Fault("learning-rate-not-scaled", _L, "SGD(0.05 * size", "SGD(0.05", is_combined=True),
    Fault("same-samples", _W, "shard(context.num_input_pipelines, context.input_pipeline_id)", "shard(1, 0)",
          is_combined=True),
    Fault("gradients-summed", _W, "global_batch_size=batch_size", "global_batch_size=batch_size // size",
          is_combined=True),
    # Ranks that the script starts, and idle ranks.
    Fault("gradients-not-averaged", _S, "    model = DistributedDataParallel(model)\n", "", is_combined=True),
    Fault("same-order", _S, "        sampler.set_epoch(epoch)\n", "", is_combined=True),
    Fault("collective-left-out", _H, "    train_epoch(epoch)\n    acc", "    if hvd.rank() == 0:\n"
          "        train_epoch(epoch)\n    acc"),
    Fault("collective-left-out", _T, "    Trainer(model", "    if rank == 0:\n        Trainer(model"),
    Fault("uneven-batches", _H, _SAMPLER,
          "DataLoader(train, args.batch_size, sampler=list(train_sampler)[: 512 * (hvd.rank() == 0)])"),
    # 7. Faults that only cost time.
    Fault("unused-parameters-searched", _T, "DistributedDataParallel(model)",
          "DistributedDataParallel(model, find_unused_parameters=True)"),
    # 8. Inputs of any structure, shares of any making, and what happens after the first epoch.
    Fault("same-samples", _D, "sampler = DistributedSampler(data)", "sampler = DistributedSampler(data, 1, 0)"),
    Fault("validation-of-one-rank", _D, "    dist.all_reduce(correct)\n", ""),
    Fault("learning-rate-differs", _D, "scheduler.step(float(total))", "scheduler.step(float(epoch * rank or -epoch))"),
    Fault("weights-part", _D, "        scheduler.step(float(total))\n", _RELOADED),
    Fault("gradients-not-averaged", _D, "model.no_sync():\n", "model.no_sync():\n                is_last = True\n"),
    Fault("gradients-not-averaged", _GAN, "maker = DistributedDataParallel(maker)\n", ""),
    Fault("same-samples", _GAN, "sampler = DistributedSampler(data)", "sampler = DistributedSampler(data, 1, 0)"),
    Fault("uneven-batches", _U, "    with Join([model]):", "    if True:"),
    Fault("samples-overlap", _U, "begin = 0 if rank == 0 else 200", "begin = 0"),
    Fault("samples-left-out", _U, "begin = 0 if rank == 0 else 200", "begin = 0 if rank == 0 else 280"),
    Fault("same-samples", _F, "sampler = DistributedSampler(data)", "sampler = DistributedSampler(data, 1, 0)"),
    Fault("validation-of-one-rank", _A, "accelerator.gather_for_metrics((guesses, labels))", "guesses, labels"),
    Fault("clipped-before-average", _O, "        parameter.grad = hvd",
          "        parameter.grad.clamp_(-1e-3, 1e-3)\n        parameter.grad = hvd"),
    Fault("", _O, "        parameter.grad = hvd", "        parameter.grad.add_(parameter.data, alpha=1e-3)\n"
          "        parameter.grad = hvd"),
    Fault("epoch-not-divided", _K, "train, test = slice(rank, 512, size), slice(512 + rank, 768, size)\n",
          _SHORTER_EPOCHS.replace("32 // size", "32")),
    # 9. Errors of the TrainCheck benchmark that have a form on CPUs.
    Fault("gradients-not-averaged", _T, "        loss.backward()\n", _CLIPPED_APART),  # deepspeed-1801
    Fault("gradients-partly-averaged", _T, "        loss.backward()\n", _LOST),  # pytorch-84803, -96600, baichuan2-86
    Fault("gradients-not-averaged", _T, "    optimizer = torch.optim", _REMADE),  # pytorch-104336
    # 10. Styles of training.
    Fault("gradients-not-averaged", _SAM, "        optimizer.zero_grad()\n        backward(inputs, labels)\n",
          "        optimizer.zero_grad()\n        with model.no_sync():\n            backward(inputs, labels)\n"),
    Fault("clipped-before-average", _SAM, "gradient * mask", "gradient.clamp(-1e-3, 1e-3)"),
    Fault("same-samples", _PPO, "states = torch.randn(8, 4)\n", "torch.manual_seed(0)\nstates = torch.randn(8, 4)\n"),
    Fault("same-samples", _LIGHTNING, "sampler=True", "sampler=False"),
    Fault("steps-skipped", _T, "        loss.backward()\n", _SKIPPED),
    # 11. What one rank does alone, constants of models, and gradients that are changed in TensorFlow.
    Fault("", _H, _BROADCAST_STATE, _STATE + _BROADCAST_STATE),  # other ranks make their slots by a step
    Fault("", _T, "        loss.backward()\n", _PROBED),
    Fault("buffers-differ", _O, "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", _CONSTANT),
    Fault("clipped-before-average", _G, _TAPE, _CLIPPED_TAPE),
    Fault("", _G, _TAPE, _CLIPPED_TAPE.replace("hvd.allreduce(tf", "(tf").replace("(one, ", "(hvd.allreduce(one), ")),
    Fault("line-search-alone", _LBFGS, "    dist.all_reduce(total)\n    return total / size\n", "    return total\n"),
    Fault("", _D, "loader = DataLoader(data, batch_size=8, sampler=sampler)",
          "loader = DataLoader(data, 8, sampler=sampler, num_workers=1, persistent_workers=True)"),
    *STYLES,
)  # fmt: skip
