"""The parameters that were wrapped, and whether they are still those: what is not among them would not be merged."""

from __future__ import annotations

from torch import nn

from straggle.backward.stages import Registered, trainable
from straggle.merge.checks import check_kinds, kinds_of


class WrappedParameters:
    """The trainable parameters of a module, with their names, as they were when it was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self.named = trainable(module)
        self.all = [parameter for _, parameter in self.named]
        self._module, self._registered = module, Registered(module)
        self._kinds = kinds_of(self.all)
        self._frozen = [
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]

    def check(self, rank: int, step: int) -> None:
        """Raise ``RuntimeError`` where the module has other parameters, or parameters of another kind."""
        if not self._registered.unchanged():
            if differences := self._registered.differences():
                raise RuntimeError(
                    f"rank {rank}, step {step}: parameters are not those that were "
                    f"wrapped ({differences}), and would not be merged: change, tie or add parameters before "
                    "StagedDataParallel(model), or close() this one and wrap the model again with a new optimizer; to "
                    "change values only, write them in place (load_state_dict, or copy_ under torch.no_grad())"
                )
            self._registered = Registered(self._module)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the model was wrapped and is not now, so it would not be "
                    "merged: wrap the model first and freeze it then, or wrap it again"
                )
        if kinds_of(self.all) != self._kinds:
            check_kinds(self.named, self._kinds)
