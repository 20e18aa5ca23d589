"""The training loop on ranks in threads. Oracle: a loop by hand in NumPy, and the flags' definitions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from numpy_ranks import Job, changed_worker, of, train
from numpy_worker import NumpyWorker

from allstep.common.data.sharding import sample_order
from allstep.common.recipe.loss_scale import LossScale
from allstep.common.recipe.noise_scale import NoiseScale
from allstep.common.training.hooks import Hook

BATCH, NUM_SAMPLES, NUM_VALIDATION = 59, 226, 37


def by_hand(rates: list[float], sizes: list[int], num_epochs: int) -> tuple[list[float], list[float]]:
    """Return the losses of steps and of validations of a softmax regression with momentum 0.9.

    Args:
        rates: learning rate of each step.
        sizes: number of samples of each step.
    """
    run = Job().build(0)
    worker, data = run.worker, run.dataset
    w, b = worker.weights["fc.weight"].astype(float), np.zeros(10)
    v, c = np.zeros_like(w), np.zeros_like(b)

    def read(split, indices):
        images, labels = split.read(indices, epoch=0)
        return (images.reshape(len(images), -1) / 255 - data.mean[0]) / data.std[0], labels

    def odds(x):
        scores = np.exp(x @ w.T + b)
        return scores / scores.sum(1, keepdims=True)

    losses, validations, steps = [], [], iter(zip(rates, sizes, strict=True))
    for epoch in range(num_epochs):
        order, begin = sample_order(np.arange(NUM_SAMPLES), NUM_SAMPLES, seed=0, epoch=epoch), 0
        while begin < NUM_SAMPLES and (step := next(steps, None)):
            rate, size = step
            x, y = read(data.train, order[begin : begin + size])
            begin += size
            error = odds(x)
            losses.append(float(-np.log(error[np.arange(size), y]).mean()))
            error[np.arange(size), y] -= 1
            v, c = 0.9 * v + error.T @ x / size, 0.9 * c + error.mean(0)
            w, b = w - rate * v, b - rate * c
        x, y = read(data.validation, np.arange(NUM_VALIDATION))
        validations.append(float(-np.log(odds(x)[np.arange(len(y)), y]).mean()))
    return losses, validations


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("slices", [(), ("--slices", 5)], ids=["", "slices"])
def test_any_number_of_ranks_trains_as_by_hand(num_ranks, slices, tmp_path):
    """The last global batch has 49 samples, which no number of ranks here divides."""
    found = train(num_ranks, tmp_path, "--epochs", 2, *slices)
    losses, validations = by_hand([0.05] * 8, [59, 59, 59, 49] * 2, 2)
    assert of("step", found, "loss") == pytest.approx(losses, rel=1e-5)
    assert of("epoch", found, "validation_loss") == pytest.approx(validations, rel=1e-5)
    assert of("epoch", found, "validation_samples") == [NUM_VALIDATION] * 2
    whole = [sum(59 * loss for loss in part[:3]) + 49 * part[3] for part in (losses[:4], losses[4:])]
    assert of("epoch", found, "train_loss") == pytest.approx([loss / NUM_SAMPLES for loss in whole], rel=1e-5)


def test_slices_leave_the_same_bits_on_any_number_of_ranks(tmp_path):
    runs = [train(ranks, tmp_path / str(ranks), "--epochs", 2, "--slices", 5) for ranks in (1, 2, 3)]
    assert len({of("end", run, "weights_checksum")[0] for run in runs}) == 1
    assert len({tuple(of("step", run, "loss")) for run in runs}) == 1


def test_ranks_without_samples_take_part(tmp_path):
    """The last global batch of 65 samples has one."""
    flags = ("--synthetic-samples", 65, "--global-batch-size", 32, "--epochs", 2)
    one, three = (train(ranks, tmp_path / str(ranks), *flags) for ranks in (1, 3))
    assert len(of("step", one, "loss")) == 6
    assert of("step", three, "loss") == pytest.approx(of("step", one, "loss"), rel=1e-5)


def test_batches_grow_tails_are_left_out_and_the_learning_rate_steps(tmp_path):
    """226 samples: 3 whole batches of 59, then one of 118; the learning rate halves between the epochs."""
    flags = ("--batch-ramp", "1:2", "--drop-last", "--lr-decay", "step", "--lr-milestones", 1, "--lr-step-factor", 0.5)
    found = train(2, tmp_path, "--epochs", 2, *flags)
    assert of("step", found, "learning_rate") == pytest.approx([0.05, 0.05, 0.05, 0.025])
    positions = [59 / 226, 118 / 226, 177 / 226, 1 + 118 / 226]
    assert of("step", found, "epoch") == pytest.approx(positions)
    losses = of("step", found, "loss")
    assert of("epoch", found, "train_loss") == pytest.approx([sum(losses[:3]) / 3, losses[3]], rel=1e-9)
    assert of("epoch", found, "validation_samples") == [NUM_VALIDATION] * 2


def test_the_learning_rate_warms_up_and_is_scaled_by_the_batch(tmp_path):
    """Within the first epoch, linearly in samples, from that of a batch of 32 to twice as much, for one of 64."""
    flags = ("--global-batch-size", 64, "--lr-scaling", "linear", "--warmup-epochs", 1)
    rates = of("step", train(1, tmp_path, "--epochs", 2, *flags), "learning_rate")
    assert rates == pytest.approx([*(0.05 + 0.05 * 64 * step / NUM_SAMPLES for step in range(4)), *[0.1] * 4])


def test_the_learning_rate_falls_on_a_plateau(tmp_path):
    """Oracle: the validation losses that the run reports, of which every rank has the same; a resume goes on alike."""
    flags = ("--lr-decay", "plateau", "--plateau-patience", 2, "--plateau-factor", 0.25, "--base-lr", 2)
    found = train(2, tmp_path / "whole", "--epochs", 8, *flags)
    rate, best, waited, expected = 2.0, math.inf, 0, []
    for loss in of("epoch", found, "validation_loss"):
        expected.append(rate)
        waited, best = (0, loss) if loss < best else (waited + 1, best)
        if waited == 2:
            rate, waited = rate / 4, 0
    assert of("epoch", found, "learning_rate") == expected and len(set(expected)) > 1
    drop = expected.index(0.5)
    for epochs in (drop - 1, drop, 8):  # it stops before the plateau is seen, and right after that
        again = train(3, tmp_path / "again", "--epochs", epochs, *flags, "--resume", "auto")
    assert of("epoch", again, "learning_rate") == expected


def test_an_epoch_reports_the_rate_of_its_last_step(tmp_path):
    found = train(2, tmp_path, "--epochs", 3, "--lr-decay", "cosine")
    rates = of("step", found, "learning_rate")
    assert of("epoch", found, "learning_rate") == rates[3::4] and len(set(rates)) == 12


def test_the_batch_doubles_after_each_epoch_in_which_the_noise_scale_exceeds_it(tmp_path):
    """Up to 8 times, where an epoch would have fewer than 5 steps otherwise."""
    flags = ("--batch-ramp", "auto", "--synthetic-samples", 1437, "--global-batch-size", 30, "--epochs", 4)
    job = Job(2, "--output-dir", tmp_path, *flags)
    found = job.train()
    factor, ramp = 1, []
    for epoch, scale in enumerate(of("epoch", found, "gradient_noise_scale"), start=1):
        if scale > 30 * factor and factor < 8:
            factor *= 2
            ramp.append((epoch, factor))
    assert ramp and [run.progress.batch_ramp for run in job.runs] == [tuple(ramp)] * 2
    sizes = [30 * max([1, *(factor for start, factor in ramp if start <= epoch)]) for epoch in range(4)]
    assert job.runs[0].progress.step == sum(-(-1437 // size) for size in sizes)


def test_the_noise_scale_is_measured_over_the_ranks_gradients(tmp_path):
    """Oracle: `NoiseScale` of the gradients of both halves of the first batch."""
    gradients = []

    def keep(self, gradient, learning_rate):
        gradients.append(gradient)
        NumpyWorker._apply(self, gradient, learning_rate)

    def half(self, batch):
        loss, gradient = NumpyWorker._loss_and_gradient(self, batch)
        halves.append((batch.num_samples, gradient / max(1, batch.num_samples)))
        return loss, gradient

    halves: list = []
    job = Job(2, "--epochs", 1, prepare=changed_worker(_apply=keep, _loss_and_gradient=half))
    job.train()
    assert {size for size, _ in halves[:2]} == {29, 30}
    noise = NoiseScale()
    squares = sum(float(gradient @ gradient) for _, gradient in halves[:2])
    square = float(gradients[0] @ gradients[0])
    for part in (squares / 2, squares / 2):
        one = NoiseScale().after(part, square, BATCH, num_parts=(2,))
        noise = NoiseScale(noise.variance + one.variance, noise.square + one.square)
    measured = [run.progress.noise for run in job.runs]
    assert sum(one.variance for one in measured) == pytest.approx(noise.variance, rel=1e-6)
    assert sum(one.square for one in measured) == pytest.approx(noise.square, rel=1e-6)


def test_ranks_stop_early_together_and_have_nothing_left_to_do(tmp_path, capsys):
    """A learning rate that is 0 in float32: the second and third epochs bring no gain, and two are waited for."""
    flags = ("--base-lr", "1e-60", "--early-stop-patience", 2)
    assert of("epoch", train(2, tmp_path, *flags), "epoch") == [1, 2, 3]
    capsys.readouterr()
    found = train(2, tmp_path, *flags, "--resume", "latest")
    assert of("epoch", found, "epoch") == [1, 2, 3] and len(of("end", found, "weights_checksum")) == 1
    assert capsys.readouterr().out == ""


def test_a_gain_lets_it_go_on(tmp_path):
    assert len(of("epoch", train(1, tmp_path, "--early-stop-patience", 1, "--epochs", 3), "epoch")) == 3


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    """Weights and slots stay as they are; the scale halves; the step is counted."""
    seen: dict[int, list[str]] = {}

    def overflow(self, batch, learning_rate, loss_scale):
        planted = len(seen.setdefault(self.collectives.rank, [])) == 2 and self.collectives.rank == 1
        result = NumpyWorker.train_step(self, batch, learning_rate, math.inf if planted else loss_scale)
        seen[self.collectives.rank].append(b"".join(array.tobytes() for array in self.export_state().values()).hex())
        return result

    class Scaled(Hook):
        def on_start(self, run):
            run.progress.loss_scale = LossScale(1024.0)

    changes = {"prepare": changed_worker(train_step=overflow), "hooks": lambda job, rank: [Scaled()]}
    found = train(2, tmp_path, "--precision", "fp16", "--epochs", 2, **changes)
    assert of("step", found, "loss_scale") == [1024] * 3 + [512] * 5
    assert of("epoch", found, "skipped_steps") == [1, 1]
    for states in seen.values():
        assert states[2] == states[1] and len(set(states)) == 7
    assert seen[0] == seen[1]


def test_a_scale_at_which_gradients_overflow_is_halved_until_they_do_not(tmp_path):
    """The first steps are skipped, so their losses, of different samples, are those of weights that do not move."""

    class Scaled(Hook):
        def on_start(self, run):
            run.progress.loss_scale = LossScale(2.0**20)

    fp16 = train(2, tmp_path / "fp16", "--precision", "fp16", "--epochs", 2, hooks=lambda job, rank: [Scaled()])
    scales, losses = of("step", fp16, "loss_scale"), of("step", fp16, "loss")
    skipped = of("epoch", fp16, "skipped_steps")[-1]
    assert 0 < skipped < 7 and scales == [2.0 ** (20 - min(step, skipped)) for step in range(8)]
    still = of("step", train(1, tmp_path / "still", "--epochs", 2, "--base-lr", "1e-60"), "loss")
    assert losses[: skipped + 1] == pytest.approx(still[: skipped + 1], rel=1e-6)
    assert losses[skipped + 1] != pytest.approx(still[skipped + 1], rel=1e-6)


def test_averages_are_validated_beside_the_weights(tmp_path):
    found = train(2, tmp_path, "--epochs", 2, "--ema", 0.5)
    assert of("epoch", found, "validation_loss") == of(
        "epoch", train(2, tmp_path / "2", "--epochs", 2), "validation_loss"
    )
    assert 0 < of("epoch", found, "ema_validation_loss")[1] != of("epoch", found, "validation_loss")[1]
    assert 0 <= of("epoch", found, "ema_validation_accuracy")[1] <= 1


def test_a_step_is_compiled_once_for_each_size_of_a_batch(tmp_path):
    job = Job(2, "--output-dir", tmp_path, "--log-every", 1, "--compile", "--epochs", 3)
    found = job.train()
    assert [run.worker.compiled for run in job.runs] == [[59, 49]] * 2
    assert of("epoch", found, "compile_seconds")[-1] > 0
    plain = train(2, tmp_path / "plain", "--epochs", 3)
    assert of("step", found, "loss") == of("step", plain, "loss") and "compile_seconds" not in str(plain)


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7, 8]), (3, [3, 6])])
def test_steps_are_reported_as_often_as_asked(every, steps, tmp_path):
    assert of("step", train(2, tmp_path, "--epochs", 2, "--log-every", every), "step") == steps


def test_steps_in_flight_are_counted_and_reported_in_order(tmp_path):
    """An asynchronous strategy may start three steps before the loss of the first is read."""
    read: list[tuple[int, int]] = []

    class Later:
        def __init__(self, worker, value):
            self.worker, self.number, self.value = worker, worker.num_steps, value

        def __float__(self):
            read.append((self.number, self.worker.num_steps))
            return self.value

    def start(self, *arguments):
        return dataclasses.replace(NumpyWorker.train_step(self, *arguments), loss_sum=Later(self, 59.0))

    def prepare(run):
        run.strategy.steps_in_flight = 2
        return changed_worker(train_step=start)(run)

    found = train(1, tmp_path, "--epochs", 2, prepare=prepare)
    assert of("step", found, "step") == list(range(1, 9))
    assert read == [(1, 3), (2, 4), (3, 4), (4, 4), (5, 7), (6, 8), (7, 8), (8, 8)]


def test_a_regression_is_reported_by_its_own_metric(tmp_path):
    """The score of `best` is higher where the error is lower."""

    def prepare(run):
        return dataclasses.replace(run, dataset=dataclasses.replace(run.dataset, task="regression"))

    errors = iter([30.0, 10.0, 20.0])
    worker = changed_worker(eval_step=lambda self, batch: (37.0, batch.targets[:, np.newaxis] + next(errors)))
    found = train(1, tmp_path, "--epochs", 3, "--keep-checkpoints", 1, prepare=lambda run: worker(prepare(run)))
    assert of("epoch", found, "validation_mae") == [30, 10, 20]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_skipped_images_are_counted_over_all_ranks(tmp_path):
    """Three of 32 cannot be read, wherever their epochs' shards put them; oracle: that number."""
    from PIL import Image

    for number in range(32):
        folder = tmp_path / "images" / ("val" if number >= 24 else "train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (number, 0, 0)).save(folder / f"{number}.png")
    for bad in ("train/a/2.png", "train/b/7.png", "val/a/30.png"):
        (tmp_path / "images" / bad).write_bytes(b"bad")
    flags = ("--dataset", "image-folder", "--data-dir", tmp_path / "images", "--image-size", 12, "--epochs", 3)
    found = train(2, tmp_path / "run", *flags, "--global-batch-size", 8, "--skip-unreadable")
    assert of("epoch", found, "unreadable_images") == [3, 3, 3]
