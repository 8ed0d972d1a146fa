import pytest

from perdure.model.errors import ConfigError
from perdure.model.steering import Change, KeySpec
from perdure.worker.steering.config import Config


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


def change(epoch=1, **values):
    return Change(epoch=epoch, step=1, values=values)


def test_a_typed_key_says_what_it_cannot_hold():
    config = Config().declare("lr", float, default=1, min=0, max=2)
    assert config.lr == 1.0
    assert isinstance(config.lr, float)
    assert config.find_veto(change(lr=0.5)) == ""
    assert "below 0" in config.find_veto(change(lr=-1.0))
    assert "above 2" in config.find_veto(change(lr=3.0))
    assert "not finite" in config.find_veto(change(lr=float("nan")))
    assert "is a float" in config.find_veto(change(lr="much"))
    assert "has not declared wd" in config.find_veto(change(wd=1))
    assert config.find_veto(change(**{"detect.hang_floor_s": 2.0})) == ""


def test_a_check_refuses_by_word_by_false_and_by_exception():
    def check(value):
        if value == 3:
            raise ValueError("no threes")
        return {1: True, 2: False, 4: "too many"}[value]

    config = Config().declare("n", int, default=0, check=check)
    said = [config.find_veto(change(n=n)) for n in (1, 2, 3, 4)]
    assert said == ["", "n: its check refuses the value", "n: no threes", "n: too many"]


def test_hooks_hear_of_changes_and_of_what_was_restored():
    heard = []
    config = Config().declare("lr", float, default=0.1, on_change=heard.append)
    config.apply(change(epoch=4, lr=0.2))
    assert (config.lr, config.epoch, heard) == (0.2, 4, [0.2])
    again = Config().declare("lr", float, default=0.1, on_change=heard.append)
    again.restore(config.state())
    assert (again.lr, again.epoch, heard) == (0.2, 4, [0.2, 0.2])


def test_the_global_batch_stays():
    config = Config().declare_batch(micro_batch=4, accumulate=2)
    assert "has to stay 8, and would be 16" in config.find_veto(change(micro_batch=8))
    assert config.find_veto(change(micro_batch=8, accumulate=1)) == ""


def test_own_keys_are_saved_only_once_they_were_changed():
    config = Config()
    config.declare_own(KeySpec(name="log_level", type="str", default=""), lambda value: None)
    assert config.state()["values"] == {}
    config.apply(change(log_level="info"))
    assert config.state()["values"] == {"log_level": "info"}
