"""Learning-rate schedule, optimizers, dropout and loss of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from t5accel.decoding.token_constraints import special_tokens
from t5accel.errors import InputError

if TYPE_CHECKING:
    from t5accel.distillation.batches import Batch

IGNORED = -100  # the label that cross-entropy skips


def learning_rate_factor(step: int, steps: int, *, warmup_steps: int = 300, decay_share: float = 0.25) -> float:
    """Warm-up, stable, linear decay to zero (Hu et al. 2024, MiniCPM); multiplies the peak rates.

    A run can be extended from before the decay.

    >>> [learning_rate_factor(s, 1000, warmup_steps=100) for s in (49, 500, 875, 1000)]
    [0.5, 1.0, 0.5, 0.0]
    """
    decay_steps = max(1, round(steps * decay_share))
    return max(0.0, min(1.0, (step + 1) / max(1, warmup_steps), (steps - step) / decay_steps))


def set_dropout(model: torch.nn.Module, p: float) -> None:
    """Set the probability of every ``nn.Dropout`` of the model, and switch the dropout of attention weights off."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        elif type(module).__name__.endswith("T5Attention"):  # MT5's and UMT5's, too
            module.dropout = 0.0


def new_optimizers(
    model: torch.nn.Module, *, learning_rate: float, matrix_learning_rate: float | None, encoder_share: float = 1.0
) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, biases and norms, and Muon for the matrices inside the layers.

    ``encoder_share`` multiplies the rates of the encoder and the embedding. Without a ``matrix_learning_rate`` AdamW
    trains everything.
    """
    # Muon: Jordan et al. 2024. In a trial of 150 steps on translation alone, Muon at 2.5e-3 had a validation loss of
    # 3.59 nats per token, AdamW at 1.2e-3 one of 4.36.
    kinds: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_matrix = bool(matrix_learning_rate) and parameter.ndim == 2 and ".block." in name and "bias" not in name
        kinds.setdefault((is_matrix, name.startswith(("encoder.", "shared."))), []).append(parameter)

    def groups(is_matrix: bool, rate: float) -> list[dict[str, Any]]:
        of_kind = [(kinds.get((is_matrix, in_encoder), []), in_encoder) for in_encoder in (False, True)]
        return [{"params": p, "lr": rate * (encoder_share if in_encoder else 1.0)} for p, in_encoder in of_kind if p]

    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups(False, learning_rate), betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if matrix_learning_rate:
        matrices = groups(True, matrix_learning_rate)
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def padded(rows: list[list[int]], value: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Right-padded (len(rows), longest) int64 tensor."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=device)


def model_inputs(batch: Batch, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of a T5 for a batch, on its device, and labels (B, T) padded with `IGNORED`."""
    tokens, device = special_tokens(model), next(model.parameters()).device
    pad, start = tokens["pad_token_id"], tokens["decoder_start_token_id"]
    input_ids, labels = padded(batch[0], pad, device), padded(batch[1], IGNORED, device)
    mask = padded([[1] * len(row) for row in batch[0]], 0, device)
    decoder_input_ids = padded([[start, *row] for row in batch[1]], pad, device)[:, :-1]
    return {"input_ids": input_ids, "attention_mask": mask, "decoder_input_ids": decoder_input_ids}, labels


def batch_loss(
    model: torch.nn.Module, batch: Batch, smoothing: float, *, hidden_until: int | None = None
) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy in nats over the labels of a batch, and their number.

    The decoder attends to a source from the first token ``hidden_until`` on; earlier positions are the encoder's alone.
    Raises ``InputError`` for a source without it.
    """
    inputs, labels = model_inputs(batch, model)
    with torch.autocast(labels.device.type, torch.bfloat16):
        if hidden_until is not None:
            ids, mask = inputs.pop("input_ids"), inputs["attention_mask"]
            shown = (ids == hidden_until).cumsum(1) > 0
            if not shown.any(1).all():
                raise InputError(f"A source has no token {hidden_until}: the decoder would see nothing of it.")
            inputs["encoder_outputs"] = model.encoder(input_ids=ids, attention_mask=mask)
            inputs["attention_mask"] = mask * shown
        logits = model(**inputs, use_cache=False, return_dict=True).logits
    return cross_entropy(logits, labels, smoothing), sum(map(len, batch[1]))


@torch.no_grad()
def validation_losses(model: torch.nn.Module, sets: dict[str, list[Batch]]) -> dict[str, float]:
    """Nats per token on each set, without dropout or smoothing."""
    losses = {}
    with evaluating(model):
        for name, batches in sets.items():
            sums = [batch_loss(model, batch, 0.0) for batch in batches]
            losses[name] = round(sum(loss.item() for loss, _ in sums) / sum(count for _, count in sums), 4)
    return losses


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode meanwhile."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Cross-entropy of logits (B, T, V) summed over labels (B, T) other than `IGNORED`."""
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
    )


def optimizer_step(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Any],
    weights: tuple[float, ...],
    *,
    factor: float,
    smoothing: float = 0.0,
    loss_of: Callable[[Any], tuple[torch.Tensor, int]] | None = None,
) -> float:
    """Update the model by the weighted sum of the batches' mean losses; return that sum, in nats per token.

    ``factor`` multiplies the peak learning rates. ``loss_of(batch)`` returns the summed loss and its number of labels,
    by default `batch_loss` with ``smoothing``.
    """
    total = 0.0
    for batch, weight in zip(batches, weights, strict=True):
        loss, labels = batch_loss(model, batch, smoothing) if loss_of is None else loss_of(batch)
        loss = loss * (weight / labels)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total
