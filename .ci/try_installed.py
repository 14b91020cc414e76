"""Try an installed ordain, without the study and outside the repository: train, save, herd, and ask the command."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ordain
from ordain.herding import herd, herding_objective


def main() -> None:
    """Raise if anything does not work."""
    assert Path(ordain.__file__).is_relative_to(sysconfig.get_path("purelib")), ordain.__file__
    assert ordain.__version__ == version("ordain")
    assert (Path(ordain.__file__).parent / "py.typed").exists()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100, 5), torch.randn(100, 1))
    for options in ({}, {"centering": "pair"}, {"params": "head"}, {"sketch": 16}):
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
        order = ordain.GraB(model, len(data), **options)
        loader = DataLoader(data, batch_size=16, sampler=order.sampler)
        for _ in range(3):
            for x, y in loader:
                (model(x) - y).square().mean().backward()
                order.step()
                model.zero_grad()
        assert sorted(order.history(2).tolist()) == list(range(100))
        with tempfile.TemporaryDirectory() as folder:
            ordain.save(Path(folder) / "run.pt", model=model, order=order)
            order.load_state_dict(ordain.load(Path(folder) / "run.pt")["order"])
        order.detach()

    z = torch.randn(500, 8)
    assert herding_objective(z, herd(z)) < herding_objective(z)
    command = Path(sys.executable).with_name("ordain")
    for word, said in (("--version", f"ordain {version('ordain')}"), ("--help", "Usage: ordain ")):
        found = subprocess.run([command, word], capture_output=True, text=True, check=True)  # noqa: S603
        assert found.stdout.startswith(said), found.stdout
    sys.stdout.write(f"ordain {version('ordain')} works with torch {torch.__version__}\n")


if __name__ == "__main__":
    main()
