"""Speed by the roofline and what it costs: against public benchmarks, and cards that can be rented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import graphmem
from graphmem.cli.main import cli
from graphmem.devices import all_devices, device_named
from graphmem.devices.prices import Rental, card_prices, price_of, rentals_in
from graphmem.errors import UsageError
from graphmem.serving.base import Request, ServedModel
from graphmem.serving.choosing import offers
from graphmem.serving.loads import busiest
from graphmem.serving.roofline import FAST, HELD, SLOW, Roofline, roofline
from graphmem.sources.hub import known_models
from tests.serving import public_speed

PRICES = "gpu,count,price,name\nH100,1,3.00,a\nL40S,4,3.60,b\nL40S,2,1.80,b\nRTX-4090,2,1.00,c\nA100-80GB,2,2.90,a\n"
_DRAFT = '{"method": "ngram", "num_speculative_tokens": 3}'
ASKED = {"enforce_eager": True, "max_model_len": 8192, "advice": False}


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(f"# of today\n{PRICES}")
    return path


def _line(name: str, gpu: str = "H100", cards: int = 1, quantization: str | None = None) -> Roofline:
    return roofline(ServedModel(name, known_models()[name]), device_named(gpu), cards, 1e5, quantization)


# --- benchmarks -------------------------------------------------------------------------------------------------------


def test_speeds_that_were_kept_back_are_near() -> None:
    kept, derived = public_speed.of("kept"), public_speed.of("derived")
    assert sum(row.is_near for row in kept) >= 61
    assert sum(row.is_near for row in derived) >= 58
    assert f"{sum(row.is_held for row in kept)} of {len(kept)}" == HELD
    assert not {row.witness for row in kept} & {row.witness for row in derived}


def test_the_interval_is_that_of_the_derived_points() -> None:
    low, middle, high = public_speed.interval(public_speed.of("derived"))
    assert (round(low, 1), round(middle, 1), round(high, 1)) == (SLOW, 1.0, FAST)


def test_the_report_has_the_table_of_today() -> None:
    page = public_speed.REPORT.read_text(encoding="utf-8")
    assert page == public_speed.with_table(page), "python -m tests.serving.public_speed"


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_a_step_reads_weights_or_computes() -> None:
    line = replace(_line("meta-llama/Llama-3.1-8B"), fixed_seconds=0.0)
    assert line.read_bytes == pytest.approx(16.06e9 - 2 * 128256 * 4096, rel=0.001)  # all but the embeddings
    assert line.token_flops + line.row_flops == pytest.approx(line.read_bytes)  # two operations on two bytes
    one, few, many = (line.answering(requests, 0) for requests in (1, 8, 4096))
    assert one == few == pytest.approx(line.read_bytes / (0.9 * 3352.32e9))
    assert many == pytest.approx(4096 * line.read_bytes / (0.55 * 989.4e12))
    assert line.answering(8, 1000) - few == pytest.approx(8 * 1000 * 1e5 / (0.9 * 3352.32e9))


def test_experts_are_read_as_they_are_chosen() -> None:
    line = _line("Qwen/Qwen3-30B-A3B")
    assert line.chosen == 8 / 128
    active = line.token_flops + line.row_flops
    assert active == pytest.approx(2 * 3.0e9, rel=0.05)
    assert line.read_bytes + line.expert_bytes == pytest.approx(61.06e9, rel=0.02)
    read = [line.answering(requests, 0) - line.fixed_seconds for requests in (1, 64)]
    assert read[0] == pytest.approx((line.read_bytes + line.expert_bytes / 16) / line.bandwidth)
    assert read[1] == pytest.approx((line.read_bytes + line.expert_bytes * (1 - (15 / 16) ** 64)) / line.bandwidth)


def test_several_cards_share_the_weights_and_sum() -> None:
    one, four = _line("meta-llama/Llama-3.3-70B"), _line("meta-llama/Llama-3.3-70B", cards=4)
    assert four.read_bytes == pytest.approx(one.read_bytes / 4, rel=0.001)
    assert four.sum_bytes == 2 * 80 * 2 * 0.75 * 8192 * 2
    assert one.sum_bytes == 0
    assert four.fixed_seconds > one.fixed_seconds


@pytest.mark.parametrize(
    ("quantization", "gpu", "faster"), [("fp8", "H100", 2), ("fp8", "A100", 1), ("awq", "H100", 1)]
)
def test_eight_bits_are_computed_faster_where_the_card_does(quantization: str, gpu: str, faster: int) -> None:
    plain, packed = (_line("Qwen/Qwen3-8B", gpu, quantization=name) for name in (None, quantization))
    assert packed.peak == faster * plain.peak
    assert packed.read_bytes < 0.7 * plain.read_bytes


@pytest.mark.parametrize(
    ("model", "gpu", "options"),
    [
        ("facebook/opt-125m", "H100", {}),
        ("Llama-3.1-8B", "RTX-4070", {}),
        ("Llama-3.1-8B", "H100", {"engine": "tgi"}),
        ("Llama-3.1-8B", "H100:3g.40gb", {}),
        ("Llama-3.1-8B", "H100", {"arguments": (("speculative_config", _DRAFT),)}),
    ],
)  # fmt: skip
def test_what_is_not_known_has_no_speed(model: str, gpu: str, options: dict[str, object]) -> None:
    asked = {"max_model_len": 2048, "advice": False, **({} if "engine" in options else {"enforce_eager": True})}
    assert graphmem.serve(model, gpu=gpu, price=3.0, **asked, **options).throughput is None  # type: ignore[arg-type]


# --- costs ------------------------------------------------------------------------------------------------------------


def test_a_million_tokens_have_a_price() -> None:
    found = graphmem.serve("Qwen3-32B", gpu="H100", tensor_parallel_size=2, load=20, price=6.0, **ASKED).throughput  # type: ignore[arg-type]
    assert found is not None
    assert found.answers_cost is not None
    assert found.requests == 20
    assert found.answers_cost.expected == pytest.approx(6.0 / 3600 / found.answers.expected * 1e6)
    assert found.answers_cost.slow > found.answers_cost.expected > found.answers_cost.fast
    assert found.prompts.slow < found.prompts.expected < found.prompts.fast
    free = graphmem.serve("Qwen3-32B", gpu="H100", tensor_parallel_size=2, **ASKED)  # type: ignore[arg-type]
    assert free.to_dict()["throughput"]["answers_cost"] is None


def test_cards_for_a_load_are_those_of_servers() -> None:
    found = graphmem.serve("Qwen3-32B", gpu="H100", load=20, lengths={50: 2000, 99: 8000}, **ASKED)  # type: ignore[arg-type]
    servers = {card.name for card in all_devices() if card.is_server}
    assert found.choices
    for asked, others in (("H100", set()), ("RTX-4090", {"RTX-4090"})):
        offered = {offer.device.name for offer in offers(device_named(asked), found.served, ())}
        assert offered - servers == others
        assert "T4-16GB" not in offered  # has no bfloat16
        assert "L4-24GB" in offered


def test_cards_that_can_be_rented_come_by_their_price(prices: Path) -> None:
    asked = {"gpu": "A100-80GB", "tensor_parallel_size": 2, "lengths": "p50=2000,p99=8000", "load": 20, **ASKED}
    found = graphmem.serve("Qwen3-32B", prices=prices, **asked)  # type: ignore[arg-type]
    rented = [(choice.gpu, choice.cards, choice.price, choice.name) for choice in found.choices]
    assert rented == [("L40S-48GB", 2, 1.8, "b"), ("A100-80GB", 2, 2.9, "a"), ("L40S-48GB", 4, 3.6, "b")]
    assert all(choice.concurrency >= 20 and (choice.speed or 0) > 5 for choice in found.choices)
    assert found.throughput is not None
    assert found.throughput.price == 2.9
    other = graphmem.serve("Qwen3-32B", gpu="H200", prices=prices, **ASKED)  # type: ignore[arg-type]
    assert any("has no price of 1 x H200-141GB" in line for line in other.assumptions)


def test_a_load_over_time_has_a_price(prices: Path) -> None:
    lengths = {"lengths": "p50=500,p99=2000", "output_lengths": "p50=200,p99=600"}
    asked = {"arrivals": "30/s", "duration": "60s", "max_wait": "1s", **lengths, **ASKED}
    found = graphmem.serve("Llama-3.1-8B", gpu="H100", prices=prices, **asked)  # type: ignore[arg-type]
    load = found.over_time
    assert load is not None
    assert load.copies is not None
    assert load.slow_copies is not None
    assert load.slow_copies >= load.copies
    assert load.price_of_all == 3.0 * load.copies
    assert load.answers_cost == pytest.approx(3.0 * load.copies * 60 / 3600 / load.answered * 1e6)
    paid = [choice.price or 0.0 for choice in found.choices]
    assert paid == sorted(paid)
    assert {choice.gpu for choice in found.choices} <= {rental.gpu for rental in rentals_in(prices)}
    assert all(choice.engines >= 1 for choice in found.choices)
    given = graphmem.serve("Llama-3.1-8B", gpu="H100", prices=prices, step_time=0.02, **asked)  # type: ignore[arg-type]
    assert given.choices == ()  # a speed that is given is of these cards alone
    assert any("is known to carry this load, at a given speed" in line for line in given.assumptions)


def test_the_busiest_hour_of_a_load() -> None:
    day = [Request(60.0 * minute, 10, 50 if 600 <= minute < 650 else 1) for minute in range(1440)]
    hour = busiest(day)
    assert len(hour) == 60
    assert hour[0].arrival == 0
    assert hour[-1].arrival == 59 * 60
    assert sum(request.output == 50 for request in hour) == 50
    assert busiest(day[:20]) == tuple(day[:20])
    assert busiest(()) == ()


def test_the_command_says_what_it_costs(prices: Path) -> None:
    asked = ["serve", "Llama-3.1-8B", "--gpu", "H100", "--max-model-len", "8192", "--enforce-eager", "--no-advice"]
    priced = CliRunner().invoke(cli, [*asked, "--load", "32", "--prices", str(prices)])
    assert priced.exit_code == 0
    for words in (
        "Cheapest cards that hold 32 requests at once",
        "an hour",
        "a million tokens of answers $",
        "an engine that is always so busy",
        "roofline",
    ):
        assert words in " ".join(priced.output.split())
    assert "with CUDA graphs, which this engine has not" in priced.output
    refused = CliRunner().invoke(cli, [*asked, "--price", "-1"])
    assert refused.exit_code == 1
    assert "--price -1" in refused.output


def test_where_no_card_is_named_the_answer_is_about_the_machine_to_rent(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("gpu,count,price\nH100-80GB,1,3\nA100-80GB,1,1\nL4,1,0.5\n")
    report = graphmem.serve("Qwen/Qwen3-8B", max_model_len=8192, load=4, prices=prices, advice=False)
    cheapest = report.choices[0]
    assert (cheapest.gpu, cheapest.price) == (report.served.gpu, 1) == ("A100-80GB", 1)
    assert report.throughput is not None
    assert report.throughput.answers_cost is not None
    assert cheapest.cost == pytest.approx(report.throughput.answers_cost.expected)
    assert [one for one in report.assumptions if "the cheapest of" in one]
    named = graphmem.serve("Qwen/Qwen3-8B", gpu="H100", max_model_len=8192, load=4, prices=prices, advice=False)
    assert (named.served.gpu, named.choices) == ("H100-80GB", report.choices)


# --- tables of prices -------------------------------------------------------------------------------------------------


def test_machines_of_a_file(prices: Path, tmp_path: Path) -> None:
    assert rentals_in(prices)[0] == Rental("RTX-4090", 2, 1.0, "c")
    assert card_prices(prices) == {"RTX-4090": 0.5, "L40S-48GB": 0.9, "A100-80GB": 1.45, "H100-80GB": 3.0}
    by_card = tmp_path / "cards.toml"
    by_card.write_text("H100 = 2.5\n")
    assert [(rental.count, rental.price) for rental in rentals_in(by_card)] == [
        (1, 2.5),
        (2, 5.0),
        (4, 10.0),
        (8, 20.0),
    ]
    eight = (Rental("H100-80GB", 8, 24.0), Rental("H100-80GB", 1, 3.5))
    assert [price_of(eight, "H100-80GB", cards) for cards in (1, 2, 3, 8, 16)] == [3.0, 6.0, 12.0, 24.0, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its columns are"),
        ("gpu,price\nH100,2\n", "accepted: gpu,count,price or with name"),
        ("gpu,count,price,region\nH100,1,2,x\n", "accepted: gpu,count,price or with name"),
        ("gpu,count,price,price\nH100,1,2,2\n", "accepted: gpu,count,price or with name"),
        ("gpu,count,price\n", "has no prices"),
        ("gpu,count,price\nH100,1\n", "line 2"),
        ("gpu,count,price\nH100,0,2\n", "line 2"),
        ("gpu,count,price\n# mine\nH100,1,free\n", "line 3"),
        ("gpu,count,price\nH100,1,nan\n", "line 2"),
        ("gpu,count,price\nH1000,1,2\n", "line 2: unknown GPU 'H1000'"),
        ("\x00", "its columns are"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        rentals_in(path)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv: No such file"):
        rentals_in(tmp_path / "none.csv")
