"""What a configuration is refused for: each message starts with file and line, and names the key, the text and a way out."""

from pathlib import Path

import pytest

from flashbench.config.axes import MAX_CASES, expand
from flashbench.config.load import load
from flashbench.errors import ConfigError

SMALL = """\
providers: [naive, sdpa]
problems:
  dtype: bf16
  seq_len: [512, 1k]
  head_dim: 64
  heads: 8
"""


def message(path: Path, content: str | bytes, **options: str) -> str:
    """The refusal of a file with this content, less the folder in front of its name."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        expand(load(path, options), ["naive", "sdpa", "flash-v2"])
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(f"{path.parent}/", "")


FILES: list[tuple[str, str | bytes, str]] = [
    ("empty file", "", "a.yaml:1: is empty"),
    ("only comments", "# nothing\n", "a.yaml:1: is empty"),
    ("not UTF-8", b"providers: [naive]\n\xff\xfe\n", "a.yaml:2: is not UTF-8 text (byte 0xff)"),
    ("control character", "a: 1\nb: \x00\n", "a.yaml:2: holds the control character 0x00"),
    ("syntax", "providers: [naive\nproblems: {}\n", "a.yaml:2: is not valid YAML"),
    ("unclosed at the end", SMALL + "measure: {l2: cold\n", "a.yaml:8: is not valid YAML"),
    ("tab", "problems:\n\tdtype: bf16\n", "a.yaml:2: is not valid YAML"),
    ("two documents", "a: 1\n---\nb: 2\n", "a.yaml:2: is not valid YAML"),
    ("a list", "\n- naive\n", "a.yaml:2: holds a list; a configuration is a mapping"),
    ("a word", "naive\n", "a.yaml:1: holds a single value; a configuration is a mapping"),
    ("too deep", "a: " + "[" * 5000, "a.yaml:1: is nested too deeply"),
    ("unknown alias", "a: 1\nb: *c\n", "a.yaml:2: is not valid YAML: found undefined alias 'c'"),
    ("alias of itself", "a: 1\nb: &c [*c]\n", "a.yaml:2: is an alias of something that holds it"),
    ("merge of itself", "a: &c\n  <<: *c\n", "a.yaml:2: '<<' merges a mapping into itself"),
    ("merge of a word", "a:\n  <<: naive\n", "a.yaml:2: '<<' merges a mapping or a list of mappings"),
    ("tag", "a: 1\nb: !!python/name:os.system x\n", "a.yaml:2: has the tag !!python/name:os.system"),
    ("list as key", "a: 1\n? [b]\n: 2\n", "a.yaml:2: a key is a single word"),
]


@pytest.mark.parametrize(("content", "start"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_a_file_that_is_no_configuration_is_refused_with_its_line(tmp_path: Path, content: str | bytes, start: str):
    assert message(tmp_path / "a.yaml", content).startswith(start)


def test_aliases_of_aliases_do_not_fill_the_memory(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "holds more than 100,000 values" in message(tmp_path / "a.yaml", "\n".join(lines))


DUPLICATES = [
    (
        "problems",
        SMALL + "  seq_len: [8k]\n",
        "a.yaml:7: the key 'seq_len' stands twice in one mapping, on lines 4 and 7",
    ),
    (
        "top level",
        SMALL + "providers: [naive]\n",
        "a.yaml:7: the key 'providers' stands twice in one mapping, on lines 1 and 7",
    ),
    (
        "flow",
        SMALL + "measure: {seed: 1,\n  seed: 2}\n",
        "a.yaml:8: the key 'seed' stands twice in one mapping, on lines 7 and 8",
    ),
]


@pytest.mark.parametrize(("content", "expected"), [d[1:] for d in DUPLICATES], ids=[d[0] for d in DUPLICATES])
def test_a_key_written_twice_is_refused_with_both_lines(tmp_path: Path, content: str, expected: str):
    """CF-04: the last one must not win without notice."""
    assert message(tmp_path / "a.yaml", content) == expected


def axis(line: str) -> str:
    """SMALL with one of its axes replaced, or one more on line 7."""
    key = line.split(":")[0]
    kept = [text for text in SMALL.splitlines() if not text.startswith(f"  {key}:")]
    return "\n".join([*kept, f"  {line}"]) + "\n"


VALUES = [
    # CF-01: text that looks like a number to somebody
    (axis("seq_len: [8k, 2**12]"), "a.yaml:6: problems.seq_len[1]: '2**12' is not a positive whole number"),
    (axis('seq_len: ["4,096"]'), "a.yaml:6: problems.seq_len[0]: '4,096' is not a positive whole number"),
    (axis("seq_len: [4,096]"), "a.yaml:6: problems.seq_len[1]: '096' is not a positive whole number"),
    (axis("seq_len: 12:30"), "a.yaml:6: problems.seq_len: '12:30' is not a positive whole number"),
    (axis("heads: 32:8"), "a.yaml:6: problems.heads: '32:8' is not a positive whole number"),
    (axis("seq_len: 1e3"), "a.yaml:6: problems.seq_len: '1e3' is not a positive whole number"),
    (axis("seq_len: 0"), "a.yaml:6: problems.seq_len: '0' is not a positive whole number"),
    (axis("seq_len: -512"), "a.yaml:6: problems.seq_len: '-512' is not a positive whole number"),
    (axis("seq_len: 0.5k"), "a.yaml:6: problems.seq_len: '0.5k' is not a positive whole number"),
    (axis("seq_len: 128/0"), "a.yaml:6: problems.seq_len: '128/0' is not a positive whole number"),
    (axis("head_dim: 64.0"), "a.yaml:6: problems.head_dim: '64.0' is not a positive whole number"),
    (axis("head_dim: [[64]]"), "a.yaml:6: problems.head_dim[0]: a list is not a positive whole number"),
    (axis("head_dim: {64: 128}"), "a.yaml:6: problems.head_dim: a mapping is not a positive whole number"),
    (axis("batch: 9" + "9" * 5000), "a.yaml:7: problems.batch: '9999"),
    # CF-03: truth values, words that were truth values, and names
    (axis("batch: true"), "a.yaml:7: problems.batch: 'true' is a truth value where a whole number is meant"),
    (axis("batch: no"), "a.yaml:7: problems.batch: 'no' is not a positive whole number"),
    (SMALL + "measure: {energy: no}\n", "a.yaml:7: measure.energy: 'no' is not a truth value; write true or false"),
    (SMALL + "measure: {energy: 1}\n", "a.yaml:7: measure.energy: '1' is not a truth value"),
    (SMALL + "measure: {max_seconds: yes}\n", "a.yaml:7: measure.max_seconds: 'yes' is text where a number is meant"),
    (
        SMALL + "measure: {max_seconds: True}\n",
        "a.yaml:7: measure.max_seconds: 'True' is a truth value where a number is meant",
    ),
    (SMALL + "gate: {margin: false}\n", "a.yaml:7: gate.margin: 'false' is a truth value where a fraction is meant"),
    (SMALL.replace("sdpa", "TRUE"), "a.yaml:1: providers[1]: 'TRUE' is a truth value where a name is meant"),
    (SMALL.replace("sdpa", "1.10"), "a.yaml:1: providers[1]: '1.10' is a number where a name is meant"),
    (SMALL.replace("sdpa", "off"), "a.yaml:1: providers[1]: unknown provider 'off'"),
    (SMALL + "name: 0x10\n", "a.yaml:7: name: '0x10' is a number where a name is meant"),
    (SMALL + "on: push\n", "a.yaml:7: unknown key 'on'"),
    (SMALL + "true: 1\n", "a.yaml:7: unknown key 'true'"),
    # masks: KF-18, a window of nothing is no mask
    (
        axis("mask: window:0"),
        "a.yaml:7: problems.mask: 'window:0' is not a mask: a window shows the last W keys, W a positive",
    ),
    (
        axis("mask: [none, window:-1]"),
        "a.yaml:7: problems.mask[1]: 'window:-1' is not a mask: a window shows the last W keys",
    ),
    (axis("mask: causl"), "a.yaml:7: problems.mask: 'causl' is not a mask; did you mean 'causal'?"),
    (axis("mask: ~"), "a.yaml:7: problems.mask: names nothing"),
    # names
    (axis("dtype: bfloat16"), "a.yaml:6: problems.dtype: 'bfloat16' is not a dtype; did you mean 'bf16'?"),
    (axis("mode: fwd"), "a.yaml:7: problems.mode: 'fwd' is not a mode; did you mean 'forward'?"),
    (
        SMALL.replace("sdpa", "flsh"),
        "a.yaml:1: providers[1]: unknown provider 'flsh'; did you mean 'flash-v2'?",
    ),  # GA-12
    (SMALL.replace("sdpa", "my kernel.py:f"), "a.yaml:1: providers[1]: 'my kernel.py:f' is not the name of a provider"),
    (SMALL + "device: 1\n", "a.yaml:7: device: '1' is a number where a device is meant; write cuda:1"),
    (SMALL + "device: gpu\n", "a.yaml:7: device: 'gpu' is not a device (known: auto, cpu, cuda, cuda:1"),
    (SMALL + "name: a/b\n", "a.yaml:7: name: 'a/b' cannot name a folder"),
    (SMALL + "version: 2\n", "a.yaml:7: version: '2' is not a version"),
    (SMALL + "measure: {l2: hot}\n", "a.yaml:7: measure.l2: 'hot' is not a state of the L2 cache (known: cold, warm)"),
    (
        SMALL + "gate: {fail_on: [missin]}\n",
        "a.yaml:7: gate.fail_on[0]: 'missin' is not a verdict to fail on; did you mean 'missing'?",
    ),
    # heads: DE-06 names both numbers
    (
        axis("heads: [8, 6/4]"),
        "a.yaml:6: problems.heads[1]: '6/4' does not work: 6 query heads do not share 4 key/value heads",
    ),
    # fractions: GA-05, 5 is not 500 %
    (SMALL + "gate: {margin: 5}\n", "a.yaml:7: gate.margin: '5' could be a percentage or a factor; write 5% or 0.05"),
    (
        SMALL + "gate: {stored_margin: 1.0}\n",
        "a.yaml:7: gate.stored_margin: '1.0' could be a percentage or a factor; write 1% or 0.01",
    ),
    (SMALL + "gate: {margin: -2%}\n", "a.yaml:7: gate.margin: '-2%' is not a fraction; write it as 2% or 0.02"),
    (SMALL + "gate: {margin: .nan}\n", "a.yaml:7: gate.margin: '.nan' is not a fraction"),
    (
        SMALL + 'gate: {overrides: {"naive *": {margin: 4}}}\n',
        "a.yaml:7: gate.overrides['naive *'].margin: '4' could be a percentage",
    ),
    (SMALL + "measure: {confidence_width: 0}\n", "a.yaml:7: measure.confidence_width: '0' must be more than 0"),
    # other numbers
    (
        SMALL + "measure: {max_seconds: .inf}\n",
        "a.yaml:7: measure.max_seconds: '.inf' is not a finite number of 0 or more",
    ),
    (SMALL + "measure: {min_samples: 1}\n", "a.yaml:7: measure.min_samples: '1' is too few: a spread needs at least 2"),
    (SMALL + "measure: {seed: 1.5}\n", "a.yaml:7: measure.seed: '1.5' is not a whole number"),
    (SMALL + "measure: {rounds: 0}\n", "a.yaml:7: measure.rounds: '0' is not a positive whole number"),
    # blocks
    (SMALL + "measure: fast\n", "a.yaml:7: measure: must be a mapping of l2,"),
    (SMALL + "include: {seq_len: 1k}\n", "a.yaml:7: include: must be a list of mappings"),
    (SMALL + "exclude: [naive]\n", "a.yaml:7: exclude[0]: must be a mapping of provider,"),
    (
        SMALL
        + "include:\n  - &a {dtype: bf16, seq_len: [1k], head_dim: 64, heads: 8}\n  - <<: *a\n    seq_len: 12:30\n",
        "a.yaml:10: include[1].seq_len: '12:30' is not a positive whole number",
    ),
]


@pytest.mark.parametrize(("content", "start"), VALUES, ids=[v[1][:60] for v in VALUES])
def test_a_value_that_does_not_fit_is_refused_with_its_line_key_and_text(tmp_path: Path, content: str, start: str):
    assert message(tmp_path / "a.yaml", content).startswith(start)


KEYS = [
    (
        axis("sequence_len: 1k"),
        "a.yaml:7: problems: unknown key 'sequence_len'; did you mean 'seq_len'? (known: mode, dtype,",
    ),
    (SMALL + "provider: [naive]\n", "a.yaml:7: unknown key 'provider'; did you mean 'providers'?"),
    (SMALL + "extend: b.yaml\n", "a.yaml:7: unknown key 'extend'; did you mean 'extends'?"),
    (SMALL + "gate:\n  margn: 2%\n", "a.yaml:8: gate: unknown key 'margn'; did you mean 'margin'?"),
    (SMALL + "exclude:\n  - {tokens: 16k}\n", "a.yaml:8: exclude[0]: unknown key 'tokens' (known: provider,"),
    (SMALL + "zip: {seq_q: [128, 256]}\n", "a.yaml:7: unknown key 'zip'"),
]


@pytest.mark.parametrize(("content", "start"), KEYS, ids=[k[1][:60] for k in KEYS])
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_known_one(tmp_path: Path, content: str, start: str):
    assert message(tmp_path / "a.yaml", content).startswith(start)


SWEEPS = [
    (SMALL.replace("[naive, sdpa]", "[]"), "a.yaml:1: providers: names nothing"),  # SD-02
    (SMALL.replace("[512, 1k]", "[]"), "a.yaml:4: problems.seq_len: names nothing"),
    (SMALL.replace("64", ""), "a.yaml:5: problems.head_dim: names nothing"),
    (SMALL.replace("providers: [naive, sdpa]\n", ""), "a.yaml:1: 'providers' is missing"),
    (SMALL.replace("  dtype: bf16\n", ""), "a.yaml:2: problems: 'dtype' is missing"),
    ("providers: [naive]\n", "a.yaml:1: no problems: add 'problems'"),
    (axis("tokens: 16k") + "  batch: 2\n", "a.yaml:7: problems.tokens: gives the batch a second time"),
    (axis("hidden: 512"), "a.yaml:7: problems.hidden: gives the heads a second time"),
    (axis("seq_kv: 512"), "a.yaml:7: problems.seq_kv: gives the length a second time, beside 'seq_len'"),
    (SMALL.replace("seq_len", "seq_q"), "a.yaml:4: problems.seq_q: needs 'seq_kv' beside it"),
    (SMALL.replace("  seq_len: [512, 1k]\n", ""), "a.yaml:2: problems: gives no sequence length"),
    (SMALL.replace("  heads: 8\n", ""), "a.yaml:2: problems: gives no heads"),
    (SMALL.replace("heads: 8", "hidden: 100"), "a.yaml:6: problems.hidden: 100 is not a multiple of head_dim 64"),
    (SMALL + "include:\n  - {dtype: bf16, seq_len: 1k, head_dim: 64}\n", "a.yaml:8: include[0]: gives no heads"),
    (SMALL + "exclude: [{}]\n", "a.yaml:7: exclude[0]: names nothing, and would exclude every case"),
    (SMALL + "exclude: [{dtype: bf16}]\n", "a.yaml:7: exclude: excludes every case; nothing is left to run"),
    (SMALL + 'gate: {overrides: {"flash *": {margin: 3%}}}\n', "a.yaml:7: gate.overrides['flash *']: matches no case"),
]


@pytest.mark.parametrize(("content", "start"), SWEEPS, ids=[s[1][:60] for s in SWEEPS])
def test_a_sweep_of_nothing_or_of_two_minds_is_refused_with_its_line(tmp_path: Path, content: str, start: str):
    assert message(tmp_path / "a.yaml", content).startswith(start)


def test_a_product_that_nobody_waits_for_is_refused_before_it_is_built(tmp_path: Path):
    many = ", ".join(map(str, range(1, 1001)))
    text = message(tmp_path / "a.yaml", axis(f"batch: [{many}]").replace("[512, 1k]", f"[{many}]"))
    assert text.startswith(f"a.yaml:2: problems: the axes make 2,000,000 cases, more than {MAX_CASES:,}")


def test_further_faults_of_a_file_are_counted(tmp_path: Path):
    text = message(tmp_path / "a.yaml", SMALL + "measure:\n  energy: no\n  seed: -1\n")
    assert text == "a.yaml:8: measure.energy: 'no' is not a truth value; write true or false (and 1 more)"


def test_a_file_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path):
    (tmp_path / "forward.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match=r"forwrd\.yaml: no file '.*forwrd\.yaml'; did you mean 'forward\.yaml'\?"):
        load(tmp_path / "forwrd.yaml")


def test_a_folder_is_refused_as_a_configuration(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a folder; name a YAML file inside it"):
        load(tmp_path)


BASES = [
    ("extends: nope.yaml\n", "top.yaml:1: extends: no file '"),
    ("name: x\nextends: .\n", "top.yaml:2: extends: '"),
    ("extends: 3\n", "top.yaml:1: extends: names one base file"),
    ("\nextends: top.yaml\n", "top.yaml:2: extends: comes back to a file it started from (top.yaml -> top.yaml)"),
    (
        "extends: loop.yaml\n",
        "loop.yaml:1: extends: comes back to a file it started from (top.yaml -> loop.yaml -> top.yaml)",
    ),
    ("extends: bad.yaml\n", "bad.yaml:6: problems.heads: '6/4' does not work"),
    ("extends: bad.yaml\nproblems:\n  heads: 6/5\n", "top.yaml:3: problems.heads: '6/5' does not work"),
    (
        "extends: good.yaml\nproblems:\n  seq_len: 12:30\n",
        "top.yaml:3: problems.seq_len: '12:30' is not a positive whole number",
    ),
    ("extends: empty.yaml\n", "empty.yaml:1: is empty"),
]


@pytest.mark.parametrize(("content", "start"), BASES, ids=[b[1][:60] for b in BASES])
def test_a_fault_through_extends_is_shown_in_the_file_that_holds_it(tmp_path: Path, content: str, start: str):
    (tmp_path / "bad.yaml").write_text(SMALL.replace("heads: 8", "heads: 6/4"))
    (tmp_path / "good.yaml").write_text(SMALL)
    (tmp_path / "loop.yaml").write_text("extends: top.yaml\n")
    (tmp_path / "empty.yaml").write_text("")
    assert message(tmp_path / "top.yaml", content).startswith(start)


OPTIONS = [
    ({"seq_len": "512,12:30"}, "--seq-len: '12:30' is not a positive whole number"),
    ({"seq_len": "4,096"}, "--seq-len: '096' is not a positive whole number"),
    ({"seq_len": "512,,1k"}, "--seq-len: an empty value is not a positive whole number"),
    ({"head_dim": ""}, "--head-dim: names nothing"),
    ({"provider": "flsh"}, "--provider: unknown provider 'flsh'; did you mean 'flash-v2'?"),
    ({"heads": "6/4"}, "--heads: '6/4' does not work: 6 query heads"),
    ({"hidden": "100"}, "--hidden: 100 is not a multiple of head_dim 64"),
    ({"batch": "1", "tokens": "4k"}, "--tokens: gives the batch a second time"),
    ({"l2": "hot"}, "--l2: 'hot' is not a state of the L2 cache"),
    ({"device": "gpu"}, "--device: 'gpu' is not a device"),
    ({"dtype": "bf16,fp61"}, "--dtype: 'fp61' is not a dtype; did you mean 'fp16'?"),
]


@pytest.mark.parametrize(("options", "start"), OPTIONS, ids=[o[1][:60] for o in OPTIONS])
def test_a_fault_on_the_command_line_names_the_option(tmp_path: Path, options: dict[str, str], start: str):
    assert message(tmp_path / "a.yaml", SMALL, **options).startswith(start)
