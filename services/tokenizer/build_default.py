"""Builds the packaged default tokenizer: `tokenizer.json` and `special_ids.json` beside this file.

Usage: `python -P -m phalanx.services.tokenizer.build_default [--check]`

A byte-level BPE of 4,096 entries with V4.1's pre-tokenization rules and V4.1's special tokens, small
enough to ship and to give a tiny model a tiny embedding. It serves models that bring no tokenizer
of their own (random-tiny, the null device); a checkpoint's own `tokenizer.json` always wins.

Layout of the ids (`special_ids.json` names them, so that a model's config can):
    0, 1, 2      begin of sentence, end of sentence, pad: as in V4.1
    3 .. 258     the 256 bytes, so that every text has an encoding
    259 ..       merges
    .. 4095      the remaining special tokens, in V4.1's order of ids

Provenance of the training text: the language reference and the source of some modules of the Python
3.11 standard library (both under the PSF licence), and sentences written for this file. The result is
committed because it depends on the interpreter's patch release (built with 3.11.7); with that release
`--check` builds it again and compares.
"""

import argparse
import importlib
import json
import pydoc_data.topics
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.services.tokenizer.encode import CJK, DIGIT, WORDS

VOCAB_SIZE = 4096
HERE = Path(__file__).parent

FIRST_SPECIALS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")

# (text, hidden from decoded text). V4.1 marks only some entries "special"; the others, such as
# <think>, are structure that a response parser must see in the text.
LAST_SPECIALS = (
    ("<｜place▁holder▁no▁799｜>", True),
    ("<｜fim▁hole｜>", False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<|EOT|>", False),
    ("<｜tool▁calls▁begin｜>", False),
    ("<｜tool▁calls▁end｜>", False),
    ("<｜tool▁call▁begin｜>", False),
    ("<｜tool▁call▁end｜>", False),
    ("<｜tool▁outputs▁begin｜>", False),
    ("<｜tool▁outputs▁end｜>", False),
    ("<｜tool▁output▁begin｜>", False),
    ("<｜tool▁output▁end｜>", False),
    ("<｜tool▁sep｜>", False),
    ("<think>", False),
    ("</think>", False),
    ("｜DSML｜", False),
    ("<｜System｜>", False),
    ("<｜latest_reminder｜>", False),
    ("<｜/polygon｜>", True),
    ("<｜polygon｜>", True),
    ("<｜/point｜>", True),
    ("<｜point｜>", True),
    ("<｜/box｜>", True),
    ("<｜box｜>", True),
    ("<｜/ref｜>", True),
    ("<｜ref｜>", True),
    ("<｜image｜>", True),
)

# Names used by a model's config.json for ids that live in the vocabulary.
CONFIG_NAMES = {
    "bos_token_id": "<｜begin▁of▁sentence｜>",
    "eos_token_id": "<｜end▁of▁sentence｜>",
    "pad_token_id": "<｜▁pad▁｜>",
    "image_token_id": "<｜image｜>",
    "dspark_noise_token_id": "<｜place▁holder▁no▁799｜>",
}

# V4.1's three splits, except that digits stand alone: 4,096 entries have no room for the thousand
# numbers of up to three digits, and half of them would be worse for arithmetic than none.
SPLITS = (DIGIT, CJK, WORDS)

CODE_MODULES = ("argparse", "dataclasses", "heapq", "json.decoder", "statistics", "textwrap")

PEOPLE = "Anna,Ben,Clara,David,Emma,Felix,Grace,Henry,Iris,Jonas,Lena,Martin,Nora,Oscar,Paula"
THINGS = (
    "apple,basket,bell,boat,book,bottle,box,bread,bridge,candle,chair,clock,coat,cup,door,drum,egg,"
    "fence,flower,garden,hammer,hat,horse,house,key,kite,lamp,letter,map,mirror,mountain,picture,"
    "pocket,river,road,rope,school,ship,shoe,stone,table,train,tree,village,wagon,wheel,window"
)
KINDS = (
    "beautiful,big,blue,broken,brown,clean,cold,dark,empty,old,golden,green,happy,heavy,little,long,"
    "new,quiet,red,round,small,soft,strange,strong,warm,white,wooden,yellow,young"
)
PLACES = (
    "in the garden,on the table,near the river,under the bridge,behind the house,at school,by the sea,"
    "in the kitchen,at the station,in the forest,on the hill,next to the window"
)
SENTENCES = (
    "{a} found a {k} {t} {p}. ",
    "{a} asked {b} where the {t} was, but nobody knew the answer.\n",
    '"Would you like to see my {t}?" said {a}. "It is {k}, and it once belonged to my mother." ',
    "One morning {a} and {b} walked together through the village because they wanted a {k} {t}. ",
    "When the sun went down, {b} could still hear the {k} {t} {p}.\n\n",
    "What is {t}? Please write a short answer with three examples.\n",
    "The {k} {t} cost {n} coins, which was more than {a} had ever paid for something so {k}. ",
    "First, think about the question. Then explain how {a} would use the {t}, step by step.\n",
    "There were {n} people {p}, and each of them had a different {t} and another story to tell. ",
    "I don't know why {b} didn't bring the {t}; it's {k} and we'll need it tomorrow.\n",
    "Everything that {a} remembered about that day had happened {p}, before the others came home. ",
    '{{"name": "{a}", "item": "{t}", "count": {n}, "tags": ["{k}", "new"], "ok": true}}\n',
    "Yes, of course. Here is a list:\n- the {k} {t}\n- a {t} from {b}\n- {n} more\n",
    "User question: how can I help {a}? Assistant: you could give {b} the {t} {p}.\n",
)
COMMON_WORDS = """
about above across act add after again against age ago agree air all allow almost alone along already
also although always among amount and animal another answer any anything appear are area arm around
arrive art as ask at away back bad bank base be beautiful because become bed before begin behind being
believe below best better between beyond bird black blood body both bring brother build building
business but buy by call came can car care carry case catch cause center central certain chance change
character child children choose church city class clear close color come common company complete
computer condition consider contain continue control corner correct could country course create cross
cut dark data daughter day dead deal death decide deep describe design detail did die difference
different difficult dinner direct discover do doctor does done down draw dream drink drive dry during
each early earth east easy eat education effect effort eight either else end enemy energy enjoy enough
enter even evening event ever every everyone example except exist expect experience explain eye face
fact fall family famous far farm fast father favorite fear feel feet few field fight figure fill final
find fine finger finish fire first fish five floor fly follow food foot for force foreign forget form
forward four free fresh friend from front full future game general get girl give glad glass go gold
good got govern grass great ground group grow guess had hair half hand happen hard has have he head
health hear heart heat held hello help her here high higher him himself his history hit hold hole home
hope hot hour how however human hundred hurt i idea if image imagine important in include increase
indeed information inside instead interest into is island it its itself job join jump just keep kill
kind king knew know knowledge land language large last late later laugh law lead learn least leave left
less let life light like line list listen live local long look lose lost lot love low machine made main
make man many mark market matter may maybe me mean meaning measure meet member memory men might mile
mind minute miss model moment money month moon more morning most mother mouth move much music must my
name nation natural nature near need never new news next night nine no north nose not note nothing
notice now number object ocean of off offer office often oh oil ok old on once one only open or order
other our out outside over own page paper parent part party pass past pay peace people perfect perhaps
person phone piece place plain plan planet plant play please point poor position possible power present
president press pretty price print probably problem process produce program promise prompt prove public
pull push put queen question quick quiet quite rain raise ran range rather reach read ready real reason
reasoning receive record remember repeat reply report request rest result return rich ride right rise
road rock room round rule run safe said same sat save saw say science sea second secret see seem self
sell send sense sentence serve set seven several shall she short should show side sign simple since
sing sister sit six size skin sky sleep slow small smile snow so soft soldier some someone something
sometimes son song soon sorry sort sound south space speak special spring stand star start state stay
step still stood stop store storm story strange street strong student study such sudden sugar suggest
summer sun sure surface surprise system table take talk tall teach tell ten than thank that the their
them themselves then there therefore these they thing think third this thorough those though thought
thousand three through throw thus time tiny to today together token told tomorrow too took top total
touch toward town travel tree trip trouble true trust try turn twelve twenty two type under understand
unit until up upon us use user usual value very view visit voice wait walk wall want war warm was wash
watch water wave way we wear weather week weight well went were west what when where whether which
while white who whole whom whose why wide wife will win wind winter wise wish with within without woman
women wonder wood word work world worry would write wrong yard year yellow yes yesterday yet you young
your yourself
"""
OTHER_LANGUAGES = (
    "你好，世界。今天天气很好，我们一起去学校。请问这是什么？我不知道，但是可以帮你找。",
    "中国人喜欢喝茶，也喜欢看书。这个问题很重要，因为时间不多了。谢谢你的回答。",
    "こんにちは、世界。これは私の本です。今日はいい天気ですね。ありがとうございます。",
    "안녕하세요. 오늘은 날씨가 좋습니다. 이것은 무엇입니까? 감사합니다.",
    "Привет, мир. Сегодня хорошая погода, и мы идём в школу. Что это такое? Спасибо за ответ.",
    "Guten Tag, die Welt ist groß. Heute gehen wir über die Brücke zur Schule, weil es schön ist.",
    "Bonjour à tous. Aujourd'hui il fait beau, et nous allons à l'école. Où est la fenêtre ? Merci.",
    "Hola, ¿cómo estás? Mañana iremos a la montaña porque el niño quiere ver la nieve. Gracias, señor.",
    "Olá, tudo bem? Amanhã não há aula, então vamos à praia com as crianças. Obrigado pela atenção.",
    "Ciao, come stai? Oggi il tempo è bello e andiamo in città. Perché no? Grazie mille.",
    "مرحبا بالعالم. اليوم الطقس جميل ونحن نذهب إلى المدرسة. شكرا لك.",
    "नमस्ते दुनिया। आज मौसम अच्छा है और हम स्कूल जा रहे हैं। धन्यवाद।",
    "Dzień dobry, świecie. Dziś jest piękna pogoda, więc idziemy do szkoły. Dziękuję bardzo.",
    "Merhaba dünya. Bugün hava çok güzel ve okula gidiyoruz. Teşekkür ederim.",
    "🙂 👍 🎉 ❤️ … — “quoted” ‘single’ • → ± × ÷ ° € £ ½",
)


def corpus() -> Iterator[str]:
    """The training text, piece by piece, the same for the same release of Python."""
    for _, text in sorted(pydoc_data.topics.topics.items()):
        yield text
    for name in CODE_MODULES:
        source = importlib.import_module(name).__file__
        assert source is not None
        yield Path(source).read_text(encoding="utf-8")
    words = COMMON_WORDS.split()
    for word in words:
        yield f" {word}" * 60
        yield f"{word.capitalize()} " * 15
    rng = random.Random(20240501)
    people, things, kinds, places = (x.split(",") for x in (PEOPLE, THINGS, KINDS, PLACES))
    for _ in range(12_000):
        a, b = rng.sample(people, 2)
        thing, kind, place = rng.choice(things), rng.choice(kinds), rng.choice(places)
        yield rng.choice(SENTENCES).format(a=a, b=b, t=thing, k=kind, p=place, n=rng.randrange(100))
    for line in OTHER_LANGUAGES:
        yield (line + "\n") * 40  # often enough that their commonest pairs become tokens


def build() -> Tokenizer:
    """Trains the BPE on `corpus` and appends the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(LAST_SPECIALS),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in FIRST_SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    for text, hidden in LAST_SPECIALS:  # one by one: added together, they would be numbered by kind
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=hidden)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, object]:
    """What a model's config needs: the size, the ids it names, and the id of every special token."""
    texts = [*FIRST_SPECIALS, *(text for text, _ in LAST_SPECIALS)]
    named = {name: tokenizer.token_to_id(text) for name, text in CONFIG_NAMES.items()}
    tokens = {text: tokenizer.token_to_id(text) for text in texts}
    return {"vocab_size": VOCAB_SIZE, **named, "tokens": tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="build, compare, write nothing")
    check = parser.parse_args().check
    tokenizer = build()
    files = {
        HERE / "tokenizer.json": tokenizer.to_str(pretty=False) + "\n",
        HERE / "special_ids.json": json.dumps(special_ids(tokenizer), ensure_ascii=False, indent=1)
        + "\n",
    }
    if check:
        stale = [path.name for path, text in files.items() if path.read_text("utf-8") != text]
        print(
            f"different: {', '.join(stale)}"
            if stale
            else "the committed files are what this builds"
        )
        return 1 if stale else 0
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
