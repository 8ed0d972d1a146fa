import pytest

from perdure.model.errors import ConfigError
from perdure.worker.config import Config


def test_declared_settings_are_attributes_and_items():
    config = Config().declare(lr=0.1, clip=1)
    assert (config.lr, config["clip"], dict(config)) == (0.1, 1, {"lr": 0.1, "clip": 1})


def test_declaring_again_keeps_what_was_changed():
    config = Config().declare(lr=0.1)
    config.restore({"epoch": 3, "values": {"lr": 0.2}})
    assert config.declare(lr=0.1, wd=0.5).lr == 0.2
    assert (config.wd, config.epoch) == (0.5, 3)
    assert Config().state() == {"epoch": 0, "values": {}}


def test_an_unknown_setting_says_what_there_is():
    with pytest.raises(AttributeError, match=r"no setting 'lr' \(declared: clip, wd\)"):
        _ = Config().declare(wd=0, clip=1).lr


def test_scripts_cannot_write():
    with pytest.raises(AttributeError, match="read-only"):
        Config().declare(lr=0.1).lr = 1


def test_only_plain_values():
    with pytest.raises(ConfigError, match="'net' is a dict"):
        Config().declare(net={})
