"""Parameters of the models whose shapes the presets take, as their makers or GPT-3's shapes give them: name, vocabulary, count."""

PUBLISHED = [
    ("gpt3-125m", 50257, 125e6),
    ("gpt3-350m", 50257, 356e6),
    ("gpt3-1.3b", 50257, 1.316e9),
    ("gpt3-2.7b", 50257, 2.65e9),
    ("gpt3-6.7b", 50257, 6.66e9),
    ("gpt3-13b", 50257, 12.85e9),
    ("gpt3-30b", 50257, 30e9),
    ("llama2-7b", 32000, 6.738e9),
    ("llama2-13b", 32000, 13.016e9),
    ("llama2-70b", 32000, 68.977e9),
    ("llama3-8b", 128256, 8.030e9),
    ("llama3-70b", 128256, 70.554e9),
]
