"""Who may name a function as a loss: what the operator allows, whatever the key."""

from __future__ import annotations

import pytest

from art.config import CustomLossConfig, ServerConfig
from art.errors import PermissionDeniedError
from art.server.routes.models import check_custom_loss

LOSS = CustomLossConfig(function="my_package.losses:capped")


@pytest.mark.parametrize(
    "allowed", [(), ("my_pack",), ("my_package.losses.more",), ("other", "losses"), ("",)], ids=str
)
def test_other_modules_are_refused_with_what_to_do(allowed: tuple[str, ...]) -> None:
    with pytest.raises(PermissionDeniedError, match=r"--custom-losses my_package\.losses") as error:
        check_custom_loss(LOSS, ServerConfig(custom_losses=allowed))
    assert "my_package.losses:capped" in str(error.value)
    assert error.value.param == "config.loss"


@pytest.mark.parametrize("allowed", ["my_package", "my_package.losses", "*"])
def test_a_module_its_package_or_all_are_allowed(allowed: str) -> None:
    check_custom_loss(LOSS, ServerConfig(custom_losses=("other", allowed)))
