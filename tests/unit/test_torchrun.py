"""What torchrun is started with: where it listens, how long it waits, where the nodes meet."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from domino_lm.launch import torchrun
from domino_lm.launch.meeting import MeetingError, OtherProgramError
from domino_lm.launch.torchrun import Node, gather, main, tensor_parallel_of

STORE = Path("/tmp/somewhere/store")


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_one_node_meets_in_a_file_and_binds_to_loopback() -> None:
    words = Node(nproc_per_node=2).torchrun(29500, 0, STORE)
    assert "--standalone" not in words
    assert (flag(words, "--rdzv-endpoint"), flag(words, "--rdzv-conf"), flag(words, "--local-addr")) == (
        str(STORE),
        "store_type=file",
        "127.0.0.1",
    )
    environment = Node().environment({})
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # or torchrun would listen for the ranks
    assert Node().meeting_in(STORE, {}) == {"DOMINO_LM_STORE_FILE": f"{STORE}-ranks"}


def test_several_nodes_meet_at_node_0_and_restarts_bear_a_cut_link(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(nnodes=2, node_rank=1, master_addr="10.0.0.1")
    words = node.torchrun(29501, 0, STORE)
    assert [flag(words, name) for name in ("--node-rank", "--master-addr", "--master-port")] == ["1", "10.0.0.1", "29501"]
    assert not {"GLOO_SOCKET_IFNAME", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"} & node.environment({}).keys()
    assert node.meeting_in(STORE, {}) == {}
    monkeypatch.setattr(torchrun, "addresses_of_host", lambda: ["127.0.1.1"])
    monkeypatch.setattr(torchrun, "interface_towards", lambda master, host: "up0")
    monkeypatch.setattr(torchrun, "addresses_by_interface", lambda: {"up0": "10.0.0.2"})
    restarting = Node(nnodes=2, node_rank=0, master_addr="10.0.0.1", max_restarts=1)
    words = restarting.torchrun(29500, 1, STORE)
    settings = dict(item.split("=") for item in flag(words, "--rdzv-conf").split(","))
    assert settings["is_host"] == "true"
    assert int(settings["read_timeout"]) >= 300
    assert int(settings["keep_alive_interval"]) * int(settings["keep_alive_max_attempt"]) >= 300
    assert flag(words, "--local-addr") == "10.0.0.2"
    assert restarting.environment({})["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_save_has_ten_minutes_after_a_signal_to_torchrun_unless_the_user_says_otherwise() -> None:
    assert Node().environment({})["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"
    given = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60", "GLOO_SOCKET_IFNAME": "eth0"}
    assert given.items() <= Node().environment(given).items()


def test_a_node_that_comes_back_joins_a_job_that_restarts_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(*_: object) -> None:
        raise OtherProgramError("what listens there is no launcher.")

    monkeypatch.setattr(torchrun, "meet", taken)
    with pytest.raises(MeetingError):
        gather(Node(nnodes=2, node_rank=1), 1.0)
    gather(Node(nnodes=2, node_rank=1, max_restarts=1), 1.0)
    assert "the job runs already, and this node joins it" in capsys.readouterr().err


def test_restarts_say_what_they_do_not_cover(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torchrun, "meet", lambda *_: None)
    gather(Node(nnodes=2, node_rank=0, max_restarts=1), 1.0)
    assert "the death of this node, or a link that is cut for over 300 s, ends the job" in capsys.readouterr().err


def test_a_wrong_port_ends_the_launcher_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with socket.create_server(("", 0)) as stranger:
        port = stranger.getsockname()[1]
        code = main(["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--", "-m", "domino_lm.pretrain"])
    signal.signal(signal.SIGUSR1, before)
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: node 0: MASTER_PORT {port} cannot be opened on ")


def test_the_tensor_parallel_size_is_found_in_the_runs_flags() -> None:
    assert tensor_parallel_of("-m domino_lm.pretrain --tensor-model-parallel-size 4 --lr 1".split()) == "4"
    assert tensor_parallel_of(["--tensor-model-parallel-size=2"]) == "2"
    assert tensor_parallel_of([]) == "1"
