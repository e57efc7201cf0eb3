"""The rotor: Givens rotations of a vector's coordinates, one after another (trainer2, technique 000.F4)."""

import torch


def rotor_index(n: int, k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return rows (i, j, slot) of the k Givens rotations on n coordinates, int64 [k, 3], in the order of application.

    Pair j of layer l rotates coordinate i = (2j + l) mod n and the next one, (i + 1) mod n, by the angle in slot
    l * (n / 2) + j. The last of the ceil(k / (n / 2)) layers may have fewer pairs. Raises ValueError if n is odd.
    """
    if n % 2:
        raise ValueError(f"a rotor joins coordinates in pairs: n must be even, not {n}")
    rows = []
    for slot in range(k if n else 0):
        layer, pair = divmod(slot, n // 2)
        i = (2 * pair + layer) % n
        rows.append((i, (i + 1) % n, slot))
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3)


def rotor_apply(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x rotated by the rotor, [..., n], in a new tensor of x's dtype.

    The Givens rotations are applied one after another, in the order of `rotor_index`: `a' = c a - s b`,
    `b' = s a + c b`.

    theta  [k], radians; pairs with slots from k on are not rotated
    x      [..., n], n even, else ValueError

    Source: trainer2, technique 000.F4.
    """
    columns = list(x.unbind(-1))
    for i, j, slot in rotor_index(x.shape[-1], theta.shape[0]).tolist():
        c, s = torch.cos(theta[slot]).to(x.dtype), torch.sin(theta[slot]).to(x.dtype)
        columns[i], columns[j] = c * columns[i] - s * columns[j], s * columns[i] + c * columns[j]
    return torch.stack(columns, dim=-1) if columns else x.clone()


def folded_metric(theta: torch.Tensor, metric: torch.Tensor, n: int) -> torch.Tensor:
    """Return `R' g R`, [n, n], where R is the matrix of the rotor and g the metric.

    A distance in this metric equals the distance between the rotated coordinates in g, because
    `(R d)' g (R d) = d' (R' g R) d`. Coordinates then need no rotation.

    theta   [k], radians
    metric  g, [n, n], or [n] for a diagonal one
    """
    rotor = rotor_apply(theta, torch.eye(n, dtype=theta.dtype, device=theta.device)).mT
    return rotor.mT @ (torch.diag(metric) if metric.dim() == 1 else metric) @ rotor
