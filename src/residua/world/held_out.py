"""The scenes of all studies in one place: settings are chosen on some and reported on others.

Each prompt stands for one clip, because `default_layout` gives its ball a place of its own. Training draws
its layouts from other random numbers, so the model has seen none of these clips.
"""

# The default prompt of the demo and of single runs.
DEMO_PROMPT = "a red rubber ball lobbed left on a sand floor in the morning"

# For choosing settings, presets and defaults; never for a published figure.
TUNING_PROMPTS = (
    "a blue rubber ball dropped on a moss floor in the morning",
    "a yellow clay ball thrown left on a slate floor at noon",
    "a green rubber ball thrown right on a brick floor in the evening",
    "a purple rubber ball lobbed left on a sand floor in the morning",
    "a red clay ball lobbed right on a moss floor at noon",
    "a blue rubber ball rolling left on a brick floor at noon",
    "a yellow rubber ball rolling right on a sand floor in the evening",
    "a green clay ball dropped on a slate floor in the evening",
)

# For published figures; never for choosing anything.
REPORT_PROMPTS = (
    "a red rubber ball dropped on a sand floor in the morning",
    "a blue rubber ball thrown left on a slate floor in the evening",
    "a yellow rubber ball thrown right on a moss floor at noon",
    "a purple rubber ball lobbed right on a brick floor at noon",
    "a green rubber ball lobbed left on a moss floor in the evening",
    "a red clay ball thrown left on a brick floor in the morning",
    "a blue clay ball rolling right on a sand floor at noon",
    "a yellow rubber ball lobbed left on a brick floor in the morning",
    "a green rubber ball dropped on a slate floor at noon",
    "a purple clay ball thrown right on a sand floor in the evening",
    "a red rubber ball rolling left on a slate floor in the evening",
    "a blue rubber ball lobbed right on a moss floor in the morning",
    "a purple rubber ball dropped on a brick floor in the evening",
    "a yellow clay ball dropped on a sand floor at noon",
    "a green rubber ball thrown left on a sand floor in the morning",
    "a red rubber ball lobbed left on a slate floor at noon",
)

SETS = {"tuning": TUNING_PROMPTS, "report": REPORT_PROMPTS}
SEEDS = {"tuning": 1_000, "report": 0}  # seeds of the noise
