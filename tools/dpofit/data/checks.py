"""Every check of `dpofit data`, as data: id, severity, title, cause, fix, and how sure it is. docs/data-checks.md is made from it.

python -m dpofit.data.checks > docs/data-checks.md
"""

# ruff: noqa: E501 - a table of sentences

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpofit.findings import Evidence, Finding, Severity

Confidence = Literal["certain", "likely", "hint"]

CONFIDENCE_MEANS = {
    "certain": "follows from LLaMA-Factory's code and every row was read",
    "likely": "measured over all rows or a stated sample; what it does to training is known from the cited work",
    "hint": "a sign worth a look; whether it matters depends on things that are not in the file",
}


@dataclass(frozen=True, slots=True)
class Check:
    id: str
    severity: Severity
    confidence: Confidence
    title: str  # {rows} is filled with "3 of 42,000 rows"
    cause: str
    fix: str
    source: str  # where the claim comes from


@dataclass(frozen=True, slots=True)
class DataFinding(Finding):
    """A finding of `dpofit data`: how sure it is, on what basis, and how many rows it is about."""

    confidence: Confidence = "certain"
    basis: str = ""
    rows: int = 0
    entry: Mapping[str, Any] | None = None  # the dataset_info.json entry that the fix suggests


def found(
    check_id: str,
    evidence: Sequence[Evidence],
    basis: str,
    words: Mapping[str, str] | None = None,
    rows: int = 0,
    fix: str = "",
    entry: Mapping[str, Any] | None = None,
) -> DataFinding:
    """The finding of one check, with its texts filled in."""
    check, words = CHECKS[check_id], words or {}
    return DataFinding(
        id=f"data.{check_id}",
        severity=check.severity,
        title=check.title.format(**words),
        evidence=tuple(evidence),
        cause=check.cause.format(**words),
        fix=fix or check.fix.format(**words),
        confidence=check.confidence,
        basis=basis,
        rows=rows,
        entry=entry,
    )


_CONVERTER = "llamafactory 0.9.5 data/converter.py"
_PAIRWISE = "llamafactory 0.9.5 data/processor/pairwise.py"
_LOADER = "llamafactory 0.9.5 data/loader.py"
_JSON = "datasets 4.0.0 packaged_modules/json/json.py"
_FORMATTER = "llamafactory 0.9.5 data/formatter.py"
_FIX = "dpofit data … --fix OUT leaves these rows out."

_ALL = (
    # --- the file as a whole
    Check("load-failed", "error", "certain", "the file does not load: {why}", "Training stops while loading the data.", "{fix}", _JSON),
    Check(
        "mixed-types", "error", "certain", "column {column} is {first} in some rows and {second} in others",
        "The loader gives a column one type; the whole file fails, even when no key of the dataset uses that column.",
        "Make the column one type or remove it; --fix OUT writes only the columns that are used.", _JSON,
    ),
    Check(
        "late-column", "error", "certain", "column {column} has no value where its type is decided, and has one later",
        "Later parts are cast to the types of the first, where this column was absent or empty: the first 10 MiB of JSON lines, the first file (in the order of os.listdir) of a folder.",
        "Give every row the column with a value of its type ('' for text), or move such a row to the top; --fix OUT does the former.", _JSON,
    ),
    Check(
        "column-absent", "error", "certain", "no row has the column {column} that dataset_info.json names",
        "The converter looks it up in the first row: KeyError.", "{fix}", f"{_CONVERTER} 88-110, 147-190",
    ),
    Check(
        "not-ranked", "error", "certain", "the dataset is not declared as ranked",
        "DPO wants pairs: \"The dataset is not applicable in the current training stage\", or every row is dropped.",
        'Add "ranking": true to its entry in dataset_info.json.', f"{_LOADER} 178-179",
    ),
    Check(
        "ranking-not-boolean", "warning", "certain", "`ranking` is {value}, not true",
        "LLaMA-Factory takes any text or number as true, the text \"false\" too.", 'Write "ranking": true.', f"{_CONVERTER} 109",
    ),
    Check(
        "info-unknown-key", "warning", "certain", "dataset_info.json has {keys}, which LLaMA-Factory ignores",
        "Only its own names of columns and tags are looked up; a misspelt one leaves its column unset.",
        "Columns: prompt, query, response, history, messages, system, tools, images, videos, audios, chosen, rejected, kto_tag. "
        "Tags: role_tag, content_tag, user_tag, assistant_tag, observation_tag, function_tag, system_tag.",
        "llamafactory 0.9.5 data/parser.py 69-92",
    ),
    Check(
        "no-usable-rows", "error", "certain", "no row gives a pair",
        'Training stops: "Cannot find valid samples, check `data/README.md` for the data format".', "{fix}", f"{_LOADER} 262-271",
    ),
    Check(
        "format-guessed", "info", "likely", "no dataset_info.json names this file; its format is guessed",
        "Without an entry LLaMA-Factory cannot use the file.", "{fix}", "the keys of the first 1,000 rows",
    ),
    Check(
        "format-unknown", "error", "likely", "no dataset_info.json names this file, and no mapping that dpofit knows gives pairs",
        "LLaMA-Factory reads the columns that an entry names; tried here were the names that public preference data uses.", "{fix}", "the keys of the first 1,000 rows",
    ),
    # --- rows that are lost, or that stop the run
    Check(
        "answer-missing", "warning", "certain", "{rows} have no chosen or no rejected answer and are dropped",
        "A row with one answer is no pair: \"Dropped invalid example\". In CSV the words None, NA, null, NaN and empty cells are null.",
        _FIX, f"{_PAIRWISE} 75-79",
    ),
    Check(
        "answer-shape", "warning", "certain", "{rows} have answers in a shape that is ignored, and are dropped",
        "alpaca wants chosen and rejected as text, sharegpt and openai as one message object; anything else counts as no answer.",
        "{fix}", f"{_CONVERTER} 108-120, 189-215",
    ),
    Check(
        "role-tags", "warning", "certain", "{rows} have roles that the tags do not name, and are dropped",
        "The values of role_tag must equal user_tag and assistant_tag: \"Invalid role tag\".", "{fix}", f"{_CONVERTER} 159-164",
    ),
    Check(
        "role-order", "warning", "certain", "{rows} do not alternate between user and assistant, and are dropped",
        "Messages must go user, assistant, user, …: \"Invalid role tag\".",
        "Merge neighbouring messages of one role, or drop the row. Only one system message may come first, under system_tag.",
        f"{_CONVERTER} 159-164",
    ),
    Check(
        "even-prompt", "warning", "certain", "{rows} have a prompt that ends with the assistant, and are dropped",
        "The prompt must have an odd number of messages: \"Invalid message count\".",
        "End the prompt with the user's message; the answers belong into chosen and rejected.", f"{_CONVERTER} 173-177",
    ),
    Check("prompt-empty-list", "warning", "certain", "{rows} have no prompt messages and are dropped", "Zero is an even number of messages.", _FIX, f"{_CONVERTER} 173-177"),
    Check("kto-rows", "error", "certain", "kto_tag is set: rows with true or false in {column} are read as KTO rows", "alpaca rows become a pair of the response column and an empty answer, chosen and rejected are ignored; sharegpt and openai rows are dropped.", "Leave kto_tag out of `columns` for DPO.", f"{_CONVERTER} 102-107, 182-188"),
    Check("history-shape", "error", "certain", "{rows} have a history that is not [question, answer] pairs", "Unpacking it fails, and with it the whole run.", "Write history as [[question, answer], …].", f"{_CONVERTER} 88-91"),
    Check("prompt-not-text", "error", "certain", "{rows} have a prompt that is not text", "Joining prompt and query fails, and with it the whole run.", "Write the prompt as text.", f"{_CONVERTER} 93-100"),
    Check("messages-shape", "error", "certain", "{rows} have messages that are not a list of objects", "The converter fails on them, and with it the whole run.", "Write a list of messages, or [].", f"{_CONVERTER} 147-161"),
    Check("role-unknown", "error", "certain", "{rows} have a role that stops the run", "Only the roles that the tags name can be encoded: KeyError or \"Unexpected role\".", "Name the role in tags, or rename it in the data.", f"{_CONVERTER} 204-215, data/template.py 166"),
    Check("content-not-text", "error", "certain", "{rows} have a message whose text is null or not text", "\"Expected a string, got …\" stops the run.", "Write text, '' for none. " + _FIX, f"{_FORMATTER} 76-78"),
    Check("tools-not-text", "error", "certain", "{rows} have tools that are not JSON text", "The template wants them as JSON in a string.", "Write tools as a JSON string.", f"{_FORMATTER} 149-155"),
    Check("tools-not-json", "error", "certain", "{rows} have tools or function calls that are not valid JSON", "\"Invalid JSON format\" stops the run.", "Write valid JSON with name and arguments.", f"{_FORMATTER} 102-110, 149-155"),
    Check("media-unsupported", "error", "certain", "{rows} have images, videos or audio under a text-only template", "\"This model does not support image input\" stops the run.", "Choose the template of the vision model, or leave the media columns out.", "llamafactory 0.9.5 data/mm_plugin.py 162-175"),
    Check("media-mismatch", "error", "certain", "{rows} have another number of <image>, <video> or <audio> marks than of files", "\"The number of images does not match\" stops the run.", "Write one mark per file, in prompt and answers together.", "llamafactory 0.9.5 data/mm_plugin.py 197-216"),
    # --- rows that load and are not what was meant
    Check("answer-role", "warning", "certain", "{rows} have an answer under the user's role", "It is not dropped: it is encoded as a user's turn, header and all, and trained on.", "Give chosen and rejected the assistant's role.", f"{_CONVERTER} 196-215"),
    Check("empty-answer", "warning", "certain", "{rows} have an empty chosen or rejected answer", "An empty chosen answer teaches silence; an empty rejected one is only an end token.", _FIX, "read in the rows"),
    Check("empty-prompt", "warning", "certain", "{rows} have an empty prompt", "The pair is trained without any question.", _FIX, "read in the rows"),
    Check("identical-answers", "warning", "certain", "{rows} have the same chosen and rejected answer", "Loss ln 2 and no gradient: the pair is paid for and teaches nothing.", _FIX, "read in the rows"),
    Check("prompt-in-answer", "warning", "likely", "{rows} repeat the prompt at the start of an answer", "The answer holds the whole conversation; its prompt part is trained on, and it is in the input twice.", "Keep only the answer's own text in chosen and rejected.", "read in the rows"),
    Check("special-tokens", "warning", "likely", "{rows} have the template's own special tokens in their text", "They are encoded as the real tokens: an end token inside an answer ends it there.", "Remove them; the template adds its own.", "llamafactory 0.9.5 data/template.py 113-119: text is encoded as it is"),
    Check("broken-encoding", "warning", "likely", "{rows} have text that was decoded wrongly", "Replacement characters, lone surrogates or UTF-8 read as Latin-1 are trained on as they stand; lone surrogates stop a JSON lines file from loading.", "Decode the source again with its real encoding.", "read in the rows"),
    Check("openai-system", "info", "certain", "formatting: openai adds \"detailed thinking off\" to every system message", "The converter was written for one family of models and does so for all.", "Use formatting: sharegpt with the tags role, content, user, assistant, system.", f"{_CONVERTER} 343-355"),
    # --- lengths
    Check("lengths-estimated", "info", "certain", "token counts are estimates: {why}", "Counts from characters are off by a sixth or more either way, counts with another pipeline by less; findings about cutoff_len inherit that.", "Give the recipe a local model folder with tokenizer.json and the template: model_name_or_path=DIR template=NAME.", "Qwen documentation, Key concepts"),
    Check("cutoff-prompt", "warning", "certain", "cutoff_len {cutoff} cuts the prompt of {rows}", "Prompts are cut from the tail: the end of the question and the assistant header are lost.", "Raise cutoff_len to {longest}, or drop them: --fix OUT --outliers drop.", f"{_PAIRWISE} 57-63"),
    Check("cutoff-eos", "warning", "certain", "cutoff_len {cutoff} cuts both answers of {rows} before their end token", "The model is never shown where these answers end.", "Raise cutoff_len to {longest}, or drop them: --fix OUT --outliers drop.", f"{_PAIRWISE} 57-63"),
    Check("cutoff-one-eos", "warning", "certain", "cutoff_len {cutoff} takes the end token from one answer of {rows}", "One answer still ends and the other does not: the pair rewards (or punishes) ending itself.", "Raise cutoff_len to {longest}, or drop them: --fix OUT --outliers drop.", f"{_PAIRWISE} 57-63"),
    Check("cutoff-identical", "warning", "certain", "cutoff_len {cutoff} makes both answers the same in {rows}", "They differ only in what is cut away: loss ln 2, no gradient.", "Raise cutoff_len to {longest}, or drop them: --fix OUT --outliers drop.", f"{_PAIRWISE} 57-63"),
    Check("answers-over-1k", "warning", "likely", "{rows} have an answer of more than 1,024 tokens", "In the field notes answers over 1k tokens are what brought the peak that killed the save; shuffling hid it, so it came at another step each time.", "Plan with the longest: dpofit predict --lengths FILE (from --lengths-out FILE); or --fix OUT --max-response 1024.", "the field notes of this project"),
    Check("length-outliers", "warning", "certain", "{few} of {total} pairs need {ratio}x the tokens of the longest of the rest", "A batch is padded to its longest row, so these few set the memory peak of the whole run, at a random step.", "Drop or cap them: --fix OUT --outliers drop; or let the peak come first: --fix OUT --order longest-first with disable_shuffling: true.", "lengths of every row"),
    # --- quality
    Check("duplicate-pairs", "warning", "certain", "{rows} repeat an earlier pair", "Repeated pairs are seen several times an epoch and are learnt by heart first.", _FIX, "hash of the normalised text of every pair"),
    Check("contradictions", "warning", "certain", "{rows} prefer A over B where another row with the same prompt prefers B over A", "Their gradients cancel; what is left is noise.", "Keep one of the two, or neither: --fix OUT drops both.", "hash of the normalised text of every pair"),
    Check("near-duplicates", "warning", "likely", "{share} of sampled prompts are near copies of another sampled prompt", "They count several times and leak into any held-out split.", "Deduplicate before pairing.", "MinHash of word 5-shingles, Jaccard ≥ 0.8 (Broder 1997; Lee et al. 2022, arXiv:2107.06499)"),
    Check("eval-leak", "warning", "certain", "{rows} have a prompt that is in the evaluation set as well", "Evaluation then measures memory.", "Remove these prompts from one side.", "hash of the normalised prompt of every row"),
    Check("eval-near-leak", "warning", "likely", "{share} of sampled prompts are near copies of an evaluation prompt", "Evaluation then measures memory in part.", "Remove these prompts from one side.", "MinHash of word 5-shingles, Jaccard ≥ 0.8"),
    Check("val-split-leak", "warning", "certain", "val_size splits rows, not prompts: about {share} of the held-out rows have a prompt that is trained on", "Several pairs share a prompt and the split puts them on both sides.", "Split by prompt and name the part as eval_dataset.", "llamafactory 0.9.5 data/data_utils.py 110-119; expected value over the random split"),
    Check("length-bias", "warning", "likely", "the chosen answer is the longer one in {share} of the pairs", "DPO learns length as a reward of its own and answers grow.", "Balance the lengths, or use a length-aware loss (ld_alpha, simpo).", "Park et al. 2024, arXiv:2403.19159; Singhal et al. 2023, arXiv:2310.03716"),
    Check("style-separable", "warning", "likely", "single words tell chosen from rejected in {share} of held-out pairs, without the prompt", "The two sides come from different writers: DPO can win by style alone. A sign that rejected was not written by the policy.", "Have the policy write the rejected answers (and better, edit them into the chosen).", "naive Bayes over words, two-fold, on a sample"),
    Check("chosen-not-an-edit", "warning", "hint", "chosen answers are no closer to rejected ones than to answers of other prompts", "A chosen answer that is no edit of the policy's own (which the rejected one should be) moves DPO towards another writer's style; the field notes name it as a sign that DPO will do little.", "Edit the policy's answers into chosen ones where you can.", "word edit distance (rapidfuzz) against shuffled pairs; the field notes of this project"),
    Check("tiny-edits", "info", "likely", "in {share} of sampled pairs less than one word in twenty differs", "With answers this close DPO can lower the likelihood of both (log-probabilities of chosen fall).", "Watch logps/chosen; pref_ftx > 0 or a DPOP-like loss holds them up.", "Pal et al. 2024, arXiv:2402.13228; Razin et al. 2024, arXiv:2410.08847"),
    Check("rejected-off-policy", "warning", "likely", "the policy finds the rejected answer less likely than the chosen one in {share} of the pairs", "Text the policy wrote itself is, per token, at least as likely to it as an edit of that text. Pushing down what the policy never says does little.", "Sample the rejected answers from the policy.", "log-probabilities given with --logps; Tajwar et al. 2024, arXiv:2404.14367"),
)  # fmt: skip

CHECKS = {check.id: check for check in _ALL}


_NOTES = """
## Where a number is a choice

- `length-outliers`: the widest gap among the longest 1% of the rows, if those above it have 1.25x the tokens below.
- `length-bias`, `style-separable`, `tiny-edits`, `rejected-off-policy`: the whole 95% Wilson interval of the share must
  lie above 65%, 90%, 50%, 50%, over at least 50 pairs.
- `chosen-not-an-edit` has no threshold of its own: the median similarity of the pairs is set against the 95th
  percentile of answers to different prompts in the same file.
- `near-duplicates`, `eval-near-leak`: Jaccard 0.8 of word 5-shingles, among at most 5,000 sampled pairs (exact copies
  are looked for in all rows).
- `answers-over-1k`: 1,024 tokens, end token included, after `cutoff_len`.

## Token counts

Exact when the template is one of LLaMA-Factory's (all 121 are reproduced, token for token), the row is text without
tools, function calls or media, and the model is a local folder (or in this machine's Hugging Face cache) whose
tokenizer.json transformers 5.5.4 uses as it is. Where transformers builds a pipeline of its own (LlamaTokenizer,
GemmaTokenizer, …) and it differs from the file's, counts are taken from the file and called not quite exact. Without
a model folder they are estimates: 3-4 characters a token, 1.5-1.8 in Chinese, Japanese and Korean, the middle of it.

## What is not checked

Hub data sets and scripts (`hf_hub_url`, `script_url`, …; download them first), `num_samples` and `max_samples` (all
rows are read), duplicate keys within one JSON object, whether media files exist, and image tokens in lengths.

## Files

- `--lengths-out FILE`: JSON lines `{"prompt": 512, "chosen": 120, "rejected": 95, "count": 3}`, tokens after
  `cutoff_len`, one line per combination. `dpofit predict --lengths FILE` reads it.
- `--logps FILE`: JSON lines `{"row": 17, "chosen": -210.4, "rejected": -95.1}`, log-probabilities of the answers under
  the policy before training, summed over their tokens, in nats.
- `--fix OUT`: `pairs.jsonl` (sharegpt), `dataset_info.json`, `report.json` (`dpofit.data-fix/1`).
"""


def document() -> str:
    """docs/data-checks.md."""
    lines = [
        "# What `dpofit data` checks",
        "",
        "Made from `tools/dpofit/data/checks.py` by `python -m dpofit.data.checks`; a test keeps the two equal.",
        "Evidence is `file:row`, rows counted from 1 (in JSON lines: the line). Severity `error` means that training",
        "stops or gets no data, and makes the command exit 1. How sure (what is said of lengths is at most `likely` when they",
        "are estimates):",
        "",
        *(f"- **{name}**: {meaning}." for name, meaning in CONFIDENCE_MEANS.items()),
        "",
        "| id | severity | sure | finding | what it does | what to do | basis |",
        "|---|---|---|---|---|---|---|",
    ]
    for check in _ALL:
        texts = [check.title, check.cause, check.fix, check.source]
        cells = [re.sub(r"\{(\w+)\}", r"*\1*", " ".join(text.replace("|", "\\|").split())) for text in texts]
        lines.append(f"| `data.{check.id}` | {check.severity} | {check.confidence} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + _NOTES


if __name__ == "__main__":
    print(document(), end="")
