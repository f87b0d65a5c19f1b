"""Our own plain prompts: forms of request filled with topics, deterministic by seed.

`topic_prompts`, `coding_prompts`, `passage_prompts`, `function_prompts` and `stub_prompts` yield `Prompt`s.
A prompt names the topics (or the passage, or the function) that it is about, so that a split can keep them apart.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MAX_CHARS = 1100

CONCEPTS = """photosynthesis; gravity; black holes; evolution; plate tectonics; vaccines; the immune system;
DNA; nuclear fusion; semiconductors; solar panels; batteries; electric motors; the water cycle; volcanoes;
earthquakes; climate change; ocean currents; coral reefs; fermentation; antibiotics; enzymes; neurons;
sleep; memory; the heart; the human eye; lightning; rainbows; tides; magnetism; radio waves; lasers;
microscopes; telescopes; satellites; rocket engines; airplane wings; bridges; concrete; steel; glass;
plastics; recycling; compost; bees; migration of birds; hibernation; camouflage; symbiosis; food chains;
rainforests; deserts; glaciers; soil; rivers; the periodic table; chemical bonds; acids and bases; entropy;
energy conservation; friction; sound waves; quantum computers; probability; statistics; prime numbers; the
Pythagorean theorem; calculus; graph theory; logic; game theory; inflation; supply and demand; compound
interest; insurance; stock markets; taxes; trade; democracy; constitutions; human rights; the scientific
method; cognitive bias; motivation; habits; body language; language acquisition; writing systems; mythology;
philosophy; stoicism; ethics; utilitarianism; meditation; nutrition; vitamins; exercise; stress; allergies;
the Big Bang; galaxies; comets; exoplanets; dark matter; time zones; calendars; maps; compasses; GPS"""

TECHNOLOGY = """machine learning; neural networks; language models; search engines; databases; SQL; indexes
in databases; operating systems; compilers; interpreters; virtual machines; containers; version control;
unit tests; code review; continuous integration; recursion; sorting algorithms; hash tables; linked lists;
binary trees; stacks and queues; dynamic programming; garbage collection; threads; deadlocks; caching; load
balancers; DNS; HTTP; TCP; encryption; passwords; phishing; firewalls; APIs; JSON; regular expressions;
Unicode; floating point numbers; bits and bytes; CPUs; GPUs; memory hierarchies; file systems; backups;
cloud computing; microservices; object-oriented programming; functional programming; type systems; Python
decorators; Python generators; list comprehensions; web browsers; cookies; accessibility on the web; open
source licences; robots; 3D printing; drones; self-driving cars; speech recognition; image compression;
video streaming; barcodes; QR codes; blockchains; spreadsheets; e-mail; Wi-Fi; Bluetooth"""

HISTORY = """the Roman Empire; ancient Egypt; the Silk Road; the Renaissance; the printing press; the French
Revolution; the Industrial Revolution; the American Civil War; World War I; World War II; the Cold War; the
moon landing; the fall of the Berlin Wall; the Great Depression; the Black Death; the Vikings; the Ottoman
Empire; the Mongol Empire; feudal Japan; the Aztecs; the Incas; ancient Greece; Alexander the Great;
Cleopatra; Leonardo da Vinci; Isaac Newton; Marie Curie; Albert Einstein; Charles Darwin; Ada Lovelace; Alan
Turing; Nelson Mandela; Mahatma Gandhi; Rosa Parks; William Shakespeare; Jane Austen; Mozart; Beethoven;
Vincent van Gogh; Frida Kahlo; the invention of the telephone; the history of bread; the history of chess;
the history of bicycles; the history of aviation; the history of writing; the Olympic Games; the United
Nations; the suffrage movement; the gold rush; the Great Wall of China"""

PLACES = """Paris; London; Rome; Tokyo; New York; Cairo; Istanbul; Sydney; Rio de Janeiro; Cape Town;
Mumbai; Beijing; Berlin; Vienna; Prague; Lisbon; Barcelona; Amsterdam; Stockholm; Reykjavik; Mexico City;
Buenos Aires; Lima; Nairobi; Marrakesh; Singapore; Bangkok; Seoul; Kyoto; Alaska; Iceland; New Zealand;
Kenya; Peru; Norway; Switzerland; the Grand Canyon; the Sahara; the Amazon; the Alps; the Himalayas; Venice;
Edinburgh; San Francisco; Chicago; Montreal"""

ACTIVITIES = """learning the guitar; learning Spanish; running a marathon; starting a garden; baking
sourdough bread; cooking for one; saving money; buying a used car; moving to a new city; adopting a dog;
training a puppy; raising chickens; painting a room; fixing a bicycle; building a bookshelf; writing a
novel; keeping a diary; giving a speech; preparing for a job interview; writing a resume; starting a small
business; working from home; managing a team; running a meeting; planning a wedding; hosting a dinner party;
organising a bookshelf; cleaning a kitchen; packing for a trip; camping in the rain; hiking in the
mountains; learning to swim; playing chess; taking photographs; drawing portraits; reading more books;
sleeping better; drinking more water; meditating every day; studying for exams; teaching children to read;
volunteering; reducing plastic waste; growing tomatoes; making coffee; brewing tea; knitting a scarf; sewing
a button; building a website; learning to program; making a podcast; editing a video; negotiating a salary;
dealing with difficult customers; making new friends; apologising to a friend"""

CHARACTERS = """a lonely lighthouse keeper; a dragon who is afraid of fire; a robot that learns to paint;
two sisters on a long train journey; an old fisherman; a cat who runs a bookshop; a time traveller in
ancient Rome; a girl who talks to trees; a baker with a secret; a detective in a small village; an astronaut
lost on Mars; a knight without a horse; a ghost who loves music; a boy and his kite; a clockmaker; a
librarian at midnight; a fox in the snow; a family of bears; a musician who lost her hearing; a king who
could not sleep; a tiny elephant; a sailor and a whale; a gardener on the moon; a student on the first day
of school; an inventor and her umbrella; a wolf who became a vegetarian; a mapmaker; a street violinist; a
snowman in summer; the last bus driver in the city; a wizard who forgot every spell; a mouse in a cathedral;
a chess-playing grandmother; a postman in a storm; a painter of doors; twins who share one shadow; a
mountain that wanted to move; a bridge builder; a talking mirror"""

FOODS = """pancakes; vegetable soup; spaghetti carbonara; chicken curry; fried rice; apple pie; chocolate
cake; banana bread; lentil stew; tomato sauce; pizza dough; tacos; sushi; omelettes; roast potatoes;
mushroom risotto; caesar salad; hummus; guacamole; pumpkin soup; beef stew; fish and chips; dumplings;
ramen; oatmeal cookies; lemonade; smoothies; granola; garlic bread; mashed potatoes; stuffed peppers;
vegetarian chili; cheesecake; scrambled eggs; French toast; coleslaw"""

OCCASIONS = """asking for a day off; apologising for a late delivery; inviting colleagues to a farewell
party; resigning from a job; thanking a teacher; complaining about a broken laptop; requesting a refund;
introducing a new team member; following up after an interview; rescheduling a meeting; asking for a letter
of recommendation; declining an invitation; congratulating a friend on a new baby; reporting a bug; asking a
landlord to repair the heating; proposing a new project; announcing office closing hours; asking for
feedback on a report; cancelling a subscription; ordering office supplies; reminding a client about an
unpaid invoice; welcoming new neighbours; asking a professor for an extension; inviting a speaker to a
conference; offering help to a colleague; thanking volunteers after an event; explaining a delay in a
project; recommending a restaurant to a friend; planning a surprise birthday party; asking a friend to look
after a cat"""

TASKS = """checks whether a string is a palindrome; reverses a linked list; computes the n-th Fibonacci
number; finds all prime numbers below n; counts the words in a text; merges two sorted lists; removes
duplicates from a list; sorts a list of dictionaries by a key; computes the factorial of a number; converts
Celsius to Fahrenheit; finds the longest word in a sentence; counts the vowels in a string; checks whether
two strings are anagrams; flattens a nested list; rotates a list by k places; finds the second largest
number in a list; transposes a matrix; multiplies two matrices; performs binary search; implements bubble
sort; implements quicksort; implements merge sort; computes the greatest common divisor; converts an integer
to Roman numerals; converts a binary string to an integer; validates an e-mail address; generates a random
password; reads a CSV file and sums a column; writes a list to a JSON file; counts how often each character
occurs; finds the intersection of two lists; checks for balanced parentheses; computes the median of a list;
groups words by their first letter; finds the common prefix of strings; splits a list into chunks of size n;
computes a moving average; finds pairs that sum to a target; computes the power set; generates all
permutations of a list; computes edit distance; implements a stack with a list; implements a queue;
implements an LRU cache; walks a binary tree in order; computes the depth of a binary tree; finds the
shortest path in a graph; detects a cycle in a graph; computes compound interest; prints a multiplication
table; draws a triangle of stars; simulates rolling two dice; plays rock, paper, scissors; plays a number
guessing game; encrypts text with a Caesar cipher; counts the lines in a file; finds duplicate files in a
folder; parses a date string; computes the days between two dates; checks whether a year is a leap year;
capitalises every word; removes punctuation from a string; compresses a string by run length; finds missing
numbers in a range; computes the dot product of two vectors; normalises a list of numbers; computes
variance; checks whether a number is perfect; sums the digits of a number; finds the majority element; zips
two lists into a dictionary; inverts a dictionary; merges nested dictionaries; counts set bits in an
integer; implements a simple calculator; finds the longest increasing subsequence; solves the coin change
problem; solves the towers of Hanoi; rounds prices to cents; formats a duration in seconds as hours and
minutes; filters even numbers; computes the product of a list; checks a sudoku row; finds the maximum
subarray sum; evaluates a polynomial; interleaves two lists; finds the index of the smallest element"""

LANGUAGES = ["Python"] * 6 + ["JavaScript", "Java", "C", "Go", "Rust", "SQL", "Bash"]

EXPLAIN = [
    "Explain {t} in simple terms.",
    "What is the main idea behind {t}?",
    "Can you tell me about {t}?",
    "Explain {t} to a ten-year-old child.",
    "Why does {t} matter? Give several reasons.",
    "Give a short introduction to {t} for beginners.",
    "List five interesting facts about {t}.",
    "What are common misunderstandings about {t}?",
    "Write a short essay about {t}.",
    "Write a paragraph about {t} for an encyclopedia.",
    "I have to give a talk about {t}. Make an outline with headings.",
    "Summarise what is known about {t} in three paragraphs.",
    "Write a dialogue between a teacher and a student about {t}.",
    "Give me ten keywords about {t} and explain each in one sentence.",
    "Write five quiz questions about {t}, with answers.",
    "Use an analogy to explain {t}.",
    "Describe {t} step by step.",
    "What should everybody know about {t}?",
    "How would an expert describe {t}? How would a beginner?",
    "Write a poem about {t}.",
    "Write a newspaper headline and a short article about {t}.",
    "hey, could u explain {t} to me? keep it short please",
    "What are the most important terms to know about {t}? Make a list with definitions.",
    "Write a lesson plan about {t} for a class of fifteen-year-olds.",
    "Imagine that you are a museum guide. Tell visitors about {t}.",
    "What questions about {t} are still open?",
    "Create a table with two columns, term and meaning, for {t}.",
    "Give three examples that show what {t} means in daily life.",
    "Write a blog post about {t} with a catchy title.",
    "I don't understand {t} at all. Where should I start?",
]

EXPLAIN_TECHNOLOGY = [
    "What are the advantages and disadvantages of {t}?",
    "How does {t} work under the hood?",
    "When should a developer care about {t}?",
    "Give a practical example of {t} with a short piece of code or pseudo-code.",
    "What mistakes do beginners make with {t}?",
    "Write interview questions about {t}, with short answers.",
    "Explain {t} to a manager who has no technical background.",
    "What are best practices for {t}?",
]

EXPLAIN_HISTORY = [
    "Make a timeline of the most important events for {t}.",
    "What were the causes and the consequences of {t}?",
    "Tell the story of {t} as if it were a bedtime story.",
    "What can we learn from {t} today?",
    "Write a diary entry by someone who lived at the time of {t}.",
    "How do historians judge {t}?",
    "Which people and places are connected with {t}?",
]

TRAVEL = [
    "Plan a three-day trip to {t}.",
    "What are the best things to see in {t}?",
    "Write a travel blog post about a recent trip to {t}.",
    "What food should I try in {t}?",
    "What should I pack for a week in {t} in {season}?",
    "Describe {t} in {season} in a vivid way.",
    "Write a postcard from {t} to a friend.",
    "Is {t} a good place for a family with small children? Explain.",
    "Give ten travel tips for {t}.",
    "How did {t} become what it is today? Summarise its history.",
    "Write a short story that takes place in {t}.",
    "I have {n} hours in {t}. What should I do?",
    "Compare visiting {t} in summer with visiting it in winter.",
    "Write a poem about {t} at night.",
    "What is the weather like in {t} during the year?",
    "Write an advertisement for a hotel in {t}.",
    "Explain to a tourist how to behave politely in {t}.",
]

ADVICE = [
    "Give me advice on {t}.",
    "What are the first steps for {t}?",
    "Make a checklist for {t}.",
    "Make a {n}-week plan for {t}.",
    "What are common mistakes when {t}?",
    "Write a beginner's guide to {t}.",
    "I am nervous about {t}. What can I do?",
    "What do I need for {t}? Give a list with a reason for each item.",
    "Write a conversation between two friends about {t}.",
    "How much time and money does {t} take?",
    "Write a motivational message for someone who is {t}.",
    "Give {n} tips for {t}.",
    "What are the pros and cons of {t}?",
    "How can I stay motivated while {t}?",
    "Write a funny story about {t}.",
    "Explain step by step: {t}.",
    "My friend says that {t} is a waste of time. How should I answer?",
    "Write a short speech about {t}.",
    "What would you say to a beginner who gave up on {t}?",
    "Suggest a daily routine that leaves room for {t}.",
]

STORIES = [
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "Write the first paragraph of a novel about {t}.",
    "Tell me a bedtime story about {t}.",
    "Write a dialogue between {t} and a stranger.",
    "Write a limerick about {t}.",
    "Describe {t} in great detail.",
    "Write a scene for a play about {t}.",
    "Write a story of about {w} words about {t}, with a surprising end.",
    "Give five ideas for stories about {t}.",
    "Write a song with two verses and a chorus about {t}.",
    "Write a letter from {t} to an old friend.",
    "Make up a name, a history and a dream for {t}.",
    "Write a fable with a moral about {t}.",
    "Write a sad story about {t}, then a happy one.",
    "Write a book review of an imaginary novel about {t}.",
    "Outline a story in five chapters about {t}.",
]

RECIPES = [
    "Give me a recipe for {t}.",
    "How do I make {t}?",
    "Write a recipe for {t} with a list of ingredients and numbered steps.",
    "What can go wrong when making {t}, and how do I fix it?",
    "Suggest three variations of {t}.",
    "Write a restaurant menu entry for {t}.",
    "What goes well with {t}?",
    "How can I make {t} without {avoid}?",
    "Where do {t} come from? Tell the history in short.",
    "Write a shopping list for {t} for {n} people.",
    "Describe the taste and the smell of {t}.",
    "Explain to a child how to make {t} safely.",
    "Is {t} healthy? Explain.",
    "Write a funny food review of {t}.",
]

LETTERS = [
    "Write an email: {t}.",
    "Write a formal email for this purpose: {t}.",
    "Write a friendly message for this purpose: {t}.",
    "Write a short text message for {t}.",
    "Draft a letter of about {w} words for {t}.",
    "Give me three versions, from casual to formal, of a message for {t}.",
    "What should I keep in mind when {t} in writing?",
    "Write a phone script for {t}.",
    "Give subject lines for an email about {t}.",
    "Write a reply to someone who wrote to us, {t}.",
    "Write an email for {t} and then explain why you chose these words.",
]

COMPARISONS = [
    "Compare {a} and {b}.",
    "What do {a} and {b} have in common, and how do they differ?",
    "Which is more important, {a} or {b}? Argue for both sides.",
    "Make a table that compares {a} with {b}.",
    "Write a debate between someone who loves {a} and someone who prefers {b}.",
    "How are {a} and {b} connected?",
]

CODING = [
    "Write a {l} function that {t}.",
    "Write a {l} program that {t}. Explain how it works.",
    "How can I write code that {t} in {l}?",
    "Write a {l} function that {t}. Include comments and an example call.",
    "I need a {l} snippet which {t}.",
    "Write a Python function that {t}, with type hints and a docstring.",
    "Write unit tests in Python for a function that {t}.",
    "Explain the algorithm behind code that {t}. No code, please.",
    "Write pseudo-code for a program that {t}.",
    "Give two different ways to write a Python function that {t}, and compare them.",
    "Write a Python class with a method that {t}.",
    "What is the time complexity of a function that {t}? Show the code first.",
    "Write a short Python script with a command line that {t}.",
    "Fix mistakes that beginners make when they write a function that {t}: list them with corrections.",
    "Complete this Python code:\n\ndef solve(data):\n    # {t}\n",
    "Implement a function that {t} in {l}, then test it with three inputs.",
    "As a tutor, guide me to write a {l} function that {t}.",
]

PASSAGE = [
    "Summarise the following text in a few sentences.\n\n{p}",
    "What is this text about?\n\n{p}",
    "Rewrite this text in simple words.\n\n{p}",
    "Ask three questions about this text and answer them.\n\n{p}",
    "{p}\n\nList the key points of the text above.",
    "{p}\n\nContinue this text.",
    "Give this text a title and explain your choice.\n\n{p}",
    "Extract all names, places and dates from the text below as a list.\n\n{p}",
    "Read the passage and write a short comment on it.\n\n{p}",
    "Turn the following passage into bullet points.\n\n{p}",
    "Rewrite the following passage as a conversation between two people.\n\n{p}",
    "Translate the following text into {foreign}.\n\n{s}",
    "Correct the spelling and grammar, if needed, and explain: {s}",
    "Rephrase this sentence in three ways: {s}",
]

FUNCTION = [
    "Explain this Python function.\n\n```python\n{f}\n```",
    "Write a docstring for this function.\n\n```python\n{f}\n```",
    "What does the following code do?\n\n{f}",
    "Add comments to this code.\n\n```python\n{f}\n```",
    "Review this code and suggest improvements.\n\n```python\n{f}\n```",
    "Write unit tests for this function.\n\n```python\n{f}\n```",
    "Rewrite this function with type hints.\n\n```python\n{f}\n```",
    "Is there a bug in this code? Think step by step.\n\n```python\n{f}\n```",
    "Give an example of how to call this function.\n\n```python\n{f}\n```",
]

STUB = [
    "{f}",
    "Complete this function.\n\n{f}",
    "Complete the following Python function.\n\n```python\n{f}\n```",
    "Write the body of this function:\n\n{f}",
]

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a patient teacher who explains with examples.",
    "You are an expert programmer. Answer with code first, then a short explanation.",
    "Answer in a friendly and cheerful tone.",
    "You are a concise assistant. Use short sentences.",
    "You are a careful writer. Use clear paragraphs and no slang.",
    "Always answer as a numbered list.",
    "You are a pirate. Stay in character.",
    "You are a helpful assistant for students. Think step by step.",
    "Answer in detail and give reasons for what you say.",
]

ENDINGS = [
    "",
    "",
    "",
    "",
    " Answer in about {w} words.",
    " Give examples.",
    " Use bullet points.",
    " Write in plain language.",
    " Be brief.",
    " Explain your reasoning.",
    " Use at least two paragraphs.",
    " Please be as detailed as possible.",
    " Thanks!",
]

SLOTS: dict[str, Sequence[str]] = {
    "w": ["50", "80", "100", "150", "200", "300"],
    "n": ["three", "four", "five", "six", "seven", "eight", "ten"],
    "season": ["spring", "summer", "autumn", "winter"],
    "avoid": ["eggs", "milk", "sugar", "gluten", "meat", "an oven"],
    "foreign": ["French", "Spanish", "German", "Italian", "Portuguese"],
}

SYSTEM_SHARE = 0.15


@dataclass(frozen=True)
class Prompt:
    """One request; `groups` names what it is about (a topic, a passage, a function, a task instance)."""

    prompt: str
    kind: str
    groups: tuple[str, ...]
    system: str | None = None


def topics(text: str) -> list[str]:
    """Split one of the lists above at its semicolons."""
    return [" ".join(topic.split()) for topic in text.split(";")]


TOPICS = {
    "concepts": topics(CONCEPTS),
    "technology": topics(TECHNOLOGY),
    "history": topics(HISTORY),
    "places": topics(PLACES),
    "activities": topics(ACTIVITIES),
    "characters": topics(CHARACTERS),
    "foods": topics(FOODS),
    "occasions": topics(OCCASIONS),
    "tasks": topics(TASKS),
}
SUBJECTS: list[tuple[str, str, list[str]]] = [
    ("explain", "concepts", EXPLAIN),
    ("explain", "technology", EXPLAIN + EXPLAIN_TECHNOLOGY),
    ("explain", "history", EXPLAIN + EXPLAIN_HISTORY),
    ("travel", "places", TRAVEL),
    ("advice", "activities", ADVICE),
    ("story", "characters", STORIES),
    ("recipe", "foods", RECIPES),
    ("letter", "occasions", LETTERS),
]
COMPARED = ("concepts", "technology", "history", "places", "foods")


def fill(form: str, rng: random.Random, **given: str) -> str:
    """Fill the slots of a form with `given` values and, for the remaining slots, random choices.

    Slots are replaced one by one, not with `str.format`: passages and code contain braces.
    """
    for slot, choices in SLOTS.items():
        form = form.replace("{" + slot + "}", rng.choice(choices))
    for slot, value in given.items():
        form = form.replace("{" + slot + "}", value)
    return form


def random_system(rng: random.Random, share: float = SYSTEM_SHARE) -> str | None:
    """Return a system prompt for a share of the requests, else None (the chat template's default)."""
    return rng.choice(SYSTEMS) if rng.random() < share else None


def topic_prompts(
    rng: random.Random, variants: int = 1, lists: Mapping[str, Sequence[str]] = TOPICS
) -> Iterator[Prompt]:
    """Yield every form with every topic of its list, `variants` times with other endings, and comparisons."""
    for kind, name, forms in SUBJECTS:
        for topic in lists[name]:
            for form in forms * variants:
                prompt = fill(form + rng.choice(ENDINGS), rng, t=topic)
                yield Prompt(prompt, kind, (f"topic {topic}",), random_system(rng))
    for name in COMPARED:
        for _ in range(4 * variants * len(lists[name])):
            a, b = rng.sample(lists[name], 2)
            prompt = fill(rng.choice(COMPARISONS) + rng.choice(ENDINGS), rng, a=a, b=b)
            yield Prompt(prompt, "compare", (f"topic {a}", f"topic {b}"), random_system(rng))


def coding_prompts(
    rng: random.Random, variants: int = 2, tasks: Sequence[str] = TOPICS["tasks"]
) -> Iterator[Prompt]:
    """Yield every coding form with every task, in `variants` random languages."""
    for task in tasks:
        for form in CODING * variants:
            prompt = fill(form, rng, t=task, l=rng.choice(LANGUAGES))
            yield Prompt(prompt, "code", (f"task {task}",), random_system(rng))


def first_sentence(passage: str) -> str:
    """Return the passage up to the end of its first sentence."""
    end = passage.find(". ")
    return passage if end < 0 else passage[: end + 1]


def passage_prompts(passages: Sequence[str], rng: random.Random, forms: int = 5) -> Iterator[Prompt]:
    """Yield `forms` requests about each passage of text."""
    for number, passage in enumerate(passages):
        for form in rng.sample(PASSAGE, forms):
            prompt = fill(form, rng, p=passage, s=first_sentence(passage))
            yield Prompt(prompt, "passage", (f"passage {number}",), random_system(rng))


def function_prompts(functions: Sequence[tuple[str, str]], rng: random.Random, forms: int) -> Iterator[Prompt]:
    """Yield `forms` requests about each (name, source) of a Python function."""
    for name, source in functions:
        for form in rng.sample(FUNCTION, forms):
            yield Prompt(fill(form, rng, f=source), "function", (f"function {name}",), random_system(rng))


def stub_prompts(stubs: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[Prompt]:
    """Yield a request to complete each (name, signature with docstring)."""
    for name, stub in stubs:
        yield Prompt(fill(rng.choice(STUB), rng, f=stub), "stub", (f"function {name}",))
