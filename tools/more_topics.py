"""More topics for the forms of `prompt_forms`, for training only: none of them is held out or measured on.

A drafter memorises a few hundred topics; with thousands it learns the forms. Most of these lists are products of
shorter ones.
"""

from collections.abc import Iterator
from itertools import product

from tools.prompt_forms import TOPICS, topics

CONCEPTS = """atoms; molecules; isotopes; ions; gases; liquids; crystals; rust; combustion; catalysts;
polymers; alloys; ceramics; soap; detergents; pigments; dyes; perfume; sugar; salt; caffeine; alcohol;
proteins; fats; carbohydrates; cholesterol; insulin; hormones; blood types; bones; muscles; joints; lungs;
kidneys; the liver; the skin; hair; teeth; taste; smell; hearing; balance; reflexes; dreams; yawning;
hiccups; sneezing; fever; viruses; bacteria; fungi; algae; moss; ferns; mushrooms; trees; leaves; roots;
seeds; flowers; pollination; fruit; grafting; hedges; meadows; wetlands; savannas; tundra; caves; canyons;
deltas; islands; lagoons; fjords; waves; currents in rivers; waterfalls; hot springs; geysers; fog; clouds;
snowflakes; hail; tornadoes; hurricanes; monsoons; droughts; floods; avalanches; landslides; tsunamis;
wildfires; the ozone layer; the greenhouse effect; carbon dioxide; methane; nitrogen; oxygen; hydrogen;
helium; carbon; iron; copper; gold; silver; aluminium; titanium; uranium; diamonds; coal; oil; natural gas;
wind power; hydropower; geothermal energy; nuclear waste; heat pumps; insulation; refrigerators;
thermostats; pendulums; levers; pulleys; gears; springs; wheels; brakes; bicycles; sailing; submarines;
hot-air balloons; helicopters; parachutes; gyroscopes; clocks; cameras; lenses; mirrors; prisms; colours;
shadows; eclipses; the seasons; the Moon; Mars; Venus; Jupiter; Saturn; meteors; asteroids; the Sun; stars;
supernovas; neutron stars; pulsars; quasars; nebulas; the Milky Way; gravitational waves; relativity; time
travel; quantum mechanics; superconductors; transistors; electricity; voltage; resistance; capacitors;
antennas; radar; sonar; X-rays; ultrasound; microwaves; infrared light; ultraviolet light; fractions;
percentages; logarithms; exponents; negative numbers; zero; infinity; pi; the golden ratio; triangles;
circles; ellipses; fractals; symmetry; vectors; matrices; sets; functions; derivatives; integrals; averages;
standard deviation; correlation; sampling; surveys; opinion polls; graphs and charts; estimation; mental
arithmetic; codes and ciphers; paradoxes; fallacies; analogies; metaphors; rhetoric; grammar; punctuation;
spelling; dialects; slang; idioms; proverbs; rhyme; rhythm; sonnets; haiku; novels; biographies; newspapers;
advertising; propaganda; libraries; museums; schools; universities; homework; exams; apprenticeships; money;
banks; loans; mortgages; credit cards; budgets; pensions; interest rates; bonds; currencies; exchange rates;
tariffs; monopolies; competition; startups; franchises; marketing; brands; customer service; supply chains;
warehouses; shipping containers; factories; assembly lines; unions; strikes; minimum wages; unemployment;
poverty; inequality; charity; cities; suburbs; villages; traffic jams; public transport; railways; canals;
tunnels; skyscrapers; elevators; sewers; tap water; waste management; elections; parties; parliaments;
presidents; monarchies; federalism; courts; juries; contracts; patents; copyright; trademarks; privacy; free
speech; censorship; treaties; embargoes; refugees; borders; passports; citizenship; nationalism;
colonialism; capitalism; socialism; liberalism; feminism; pacifism; existentialism; empiricism; rationalism;
scepticism; free will; consciousness; happiness; friendship; love; jealousy; anger; fear; grief; gratitude;
humour; boredom; curiosity; creativity; intelligence; talent; willpower; procrastination; perfectionism;
introversion; leadership; teamwork; negotiation; conflict; compromise; trust; honesty; forgiveness; manners;
rituals; weddings; funerals; holidays; birthdays; gifts; fashion; jewellery; tattoos; hairstyles;
architecture; gardens; sculpture; painting; photography; film; animation; theatre; opera; ballet; jazz;
blues; rock music; hip-hop; folk songs; choirs; orchestras; pianos; violins; drums; notation in music;
scales in music; harmony; puppets; circuses; magic tricks; card games; board games; crosswords; video games;
football; basketball; tennis; swimming; gymnastics; skiing; surfing; climbing; yoga; martial arts; fasting;
vegetarian diets; food labels; food preservation; cheese; bread; chocolate; coffee; tea; honey; spices;
olive oil; rice; potatoes; maize; wheat; cattle; horses; dogs; cats; rats; bats; whales; dolphins; sharks;
octopuses; jellyfish; snakes; frogs; turtles; crocodiles; dinosaurs; mammoths; fossils; owls; penguins;
parrots; ants; butterflies; spiders; mosquitoes; worms; zoos; national parks; endangered species; invasive
species; beekeeping; fishing; hunting; domestication; farming; irrigation; fertilisers; pesticides;
greenhouses; genetic engineering; cloning; stem cells; organ donation; surgery; anaesthesia; first aid;
hospitals; pharmacies; placebos; clinical trials; epidemics; quarantine; hygiene; sunscreen; posture; back
pain; headaches; asthma; diabetes; blood pressure; burnout; addiction; therapy; mindfulness"""

TECHNOLOGY = """variables; loops; conditionals; functions in programming; scope; closures; pointers;
references; arrays; dictionaries; tuples; strings; integers and overflow; enumerations; exceptions; logging;
debugging; profiling; refactoring; design patterns; the singleton pattern; the observer pattern; dependency
injection; inheritance; composition; interfaces; abstract classes; generics; macros; metaprogramming;
reflection; iterators; coroutines; async and await; event loops; callbacks; promises; futures; mutexes;
semaphores; race conditions; atomic operations; message queues; publish and subscribe; REST; GraphQL; gRPC;
WebSockets; webhooks; sessions; tokens for login; OAuth; two-factor authentication; certificates; hashing;
salting passwords; digital signatures; public keys; VPNs; proxies; content delivery networks; IP addresses;
IPv6; routers; switches; subnets; ports; sockets; UDP; bandwidth; latency; packet loss; NAT; HTML; CSS;
JavaScript; TypeScript; the document object model; forms on web pages; responsive design; web fonts; service
workers; single-page applications; server-side rendering; templates; XML; YAML; CSV files; Markdown; PDF;
ZIP files; JPEG; PNG; MP3; video codecs; sampling rates; colour spaces; vector graphics; ray tracing;
shaders; game engines; physics engines; pathfinding; virtual reality; augmented reality; motion capture;
touch screens; keyboards; mice; printers; scanners; monitors; hard disks; solid-state drives; RAID; USB
sticks; BIOS; bootloaders; kernels; device drivers; processes; scheduling; virtual memory; paging; swap
space; permissions on files; symbolic links; shells; pipes; cron jobs; package managers; environment
variables; makefiles; linkers; assembly language; bytecode; just-in-time compilation; static analysis;
linters; code formatters; semantic versioning; branches in Git; merge conflicts; pull requests; code
comments; documentation; agile development; pair programming; technical debt; estimation of software
projects; release notes; feature flags; A/B tests; monitoring; alerts; incident reports; disaster recovery;
data centres; serverless functions; Kubernetes; Docker; infrastructure as code; transactions in databases;
normal forms; joins in SQL; primary keys; foreign keys; views in SQL; triggers; stored procedures; query
plans; replication; sharding; eventual consistency; key-value stores; document databases; graph databases;
time series; data warehouses; data cleaning; missing data; outliers; pivot tables; dashboards; web scraping;
tries; heaps; graphs; adjacency lists; depth-first search; breadth-first search; greedy algorithms;
backtracking; divide and conquer; binary search trees; red-black trees; Bloom filters; big O notation;
NP-complete problems; finite state machines; parsers; tokenisers; abstract syntax trees; grammars; Turing
machines; linear regression; logistic regression; decision trees; random forests; gradient boosting; k-means
clustering; nearest neighbours; support vector machines; principal component analysis; overfitting;
cross-validation; precision and recall; gradient descent; backpropagation; activation functions;
convolutional networks; recurrent networks; transformers; attention in neural networks; embeddings; word
vectors; tokenisation; fine-tuning; reinforcement learning; recommender systems; spam filters; face
recognition; machine translation; chatbots; text to speech; optical character recognition; edge computing;
smart homes; sensors; microcontrollers; Arduino; Raspberry Pi; satellites for navigation; electric cars;
batteries for phones; wireless charging; e-readers; smart watches; digital cameras; streaming services;
podcasts; social networks; online shopping; digital money; e-signatures; online maps; translation apps;
password managers; ad blockers; captchas"""

HISTORY = """the Stone Age; the Bronze Age; the Iron Age; Mesopotamia; Babylon; the Phoenicians; Carthage;
the Persian Empire; Sparta; Athens; the Etruscans; Julius Caesar; Augustus; Nero; Hadrian; Constantine; the
Byzantine Empire; Charlemagne; the Crusades; the Magna Carta; the Hundred Years' War; Joan of Arc; the
Hanseatic League; the Medici; the Reformation; Martin Luther; the Spanish Armada; Elizabeth I; Henry VIII;
Oliver Cromwell; Louis XIV; Peter the Great; Catherine the Great; Napoleon; the Congress of Vienna; Simon
Bolivar; the Haitian Revolution; the American Revolution; George Washington; Benjamin Franklin; Thomas
Jefferson; Abraham Lincoln; Harriet Tubman; Frederick Douglass; the Gold Coast; the Opium Wars; the Meiji
Restoration; the Taiping Rebellion; the Crimean War; Florence Nightingale; Otto von Bismarck; Queen
Victoria; the Suez Canal; the Panama Canal; the Titanic; the Russian Revolution; the Treaty of Versailles;
the Weimar Republic; the Spanish Civil War; the Battle of Britain; D-Day; the Marshall Plan; the Korean War;
the Vietnam War; the Cuban Missile Crisis; apartheid; the Space Race; Apollo 13; the Berlin Airlift; the
European Union; Martin Luther King; Malcolm X; Emmeline Pankhurst; Winston Churchill; Franklin Roosevelt;
Theodore Roosevelt; John F. Kennedy; Mikhail Gorbachev; Margaret Thatcher; Confucius; Buddha; Socrates;
Plato; Aristotle; Archimedes; Euclid; Hypatia; Galileo; Kepler; Copernicus; Descartes; Leibniz; Voltaire;
Rousseau; Kant; Hegel; Nietzsche; Karl Marx; Adam Smith; David Hume; John Locke; Isambard Brunel; James
Watt; Michael Faraday; James Clerk Maxwell; Thomas Edison; Nikola Tesla; the Wright brothers; Amelia
Earhart; Louis Pasteur; Gregor Mendel; Rosalind Franklin; Niels Bohr; Richard Feynman; Grace Hopper;
Katherine Johnson; Homer; Virgil; Dante; Chaucer; Cervantes; Goethe; Charles Dickens; Mark Twain; Leo
Tolstoy; Fyodor Dostoevsky; Emily Dickinson; Oscar Wilde; Virginia Woolf; Franz Kafka; Ernest Hemingway;
George Orwell; Agatha Christie; J. R. R. Tolkien; Michelangelo; Raphael; Rembrandt; Vermeer; Claude Monet;
Pablo Picasso; Salvador Dali; Andy Warhol; Bach; Handel; Chopin; Tchaikovsky; Louis Armstrong; the Beatles;
Elvis Presley; Charlie Chaplin; Walt Disney; Marco Polo; Christopher Columbus; Ferdinand Magellan; James
Cook; Captain Scott; Roald Amundsen; Ernest Shackleton; Genghis Khan; Saladin; Suleiman the Magnificent;
Akbar; Ashoka; the Mughal Empire; the Khmer Empire; the Mali Empire; Great Zimbabwe; the Maya; the Olmecs;
Easter Island; the Maori; Aboriginal Australians; the samurai; the ninja; the pirates of the Caribbean;
knights; castles; gladiators; the Colosseum; the pyramids; Stonehenge; Pompeii; Petra; Machu Picchu; Angkor
Wat; the Taj Mahal; the Eiffel Tower; the Statue of Liberty; the Parthenon; Notre-Dame; the Great Fire of
London; the San Francisco earthquake; the Chernobyl disaster; the Great Plague; the Spanish flu; the history
of money; the history of paper; the history of clocks; the history of medicine; the history of mathematics;
the history of football; the history of tea; the history of coffee; the history of chocolate; the history of
sugar; the history of glass; the history of photography; the history of cinema; the history of radio; the
history of television; the history of computers; the history of the internet; the history of video games;
the history of railways; the history of cars; the history of ships; the history of maps; the history of
toys; the history of fashion; the history of the piano; the history of jazz; the history of postage
stamps"""

PLACES = """Afghanistan; Albania; Algeria; Argentina; Armenia; Australia; Austria; Azerbaijan; the Bahamas;
Bangladesh; Barbados; Belgium; Belize; Bhutan; Bolivia; Bosnia; Botswana; Brazil; Bulgaria; Cambodia;
Cameroon; Canada; Chile; China; Colombia; Costa Rica; Croatia; Cuba; Cyprus; the Czech Republic; Denmark;
Ecuador; Egypt; Estonia; Ethiopia; Fiji; Finland; France; Georgia; Germany; Ghana; Greece; Greenland;
Guatemala; Honduras; Hungary; India; Indonesia; Iran; Ireland; Israel; Italy; Jamaica; Japan; Jordan;
Kazakhstan; Laos; Latvia; Lebanon; Lithuania; Luxembourg; Madagascar; Malawi; Malaysia; the Maldives; Mali;
Malta; Mauritius; Mexico; Moldova; Mongolia; Montenegro; Morocco; Mozambique; Namibia; Nepal; the
Netherlands; Nicaragua; Nigeria; Oman; Pakistan; Panama; Paraguay; the Philippines; Poland; Portugal; Qatar;
Romania; Rwanda; Samoa; Saudi Arabia; Scotland; Senegal; Serbia; the Seychelles; Slovakia; Slovenia; South
Africa; South Korea; Spain; Sri Lanka; Sweden; Taiwan; Tanzania; Thailand; Tibet; Tonga; Tunisia; Turkey;
Uganda; Ukraine; Uruguay; Uzbekistan; Vietnam; Wales; Zambia; Zanzibar; Zimbabwe; Athens; Florence; Naples;
Milan; Turin; Bologna; Verona; Siena; Palermo; Madrid; Seville; Granada; Valencia; Bilbao; Toledo; Porto;
Lyon; Marseille; Nice; Bordeaux; Strasbourg; Brussels; Bruges; Antwerp; Rotterdam; The Hague; Hamburg;
Munich; Cologne; Dresden; Leipzig; Heidelberg; Salzburg; Innsbruck; Zurich; Geneva; Lucerne; Copenhagen;
Oslo; Bergen; Helsinki; Tallinn; Riga; Vilnius; Warsaw; Krakow; Gdansk; Budapest; Bratislava; Ljubljana;
Zagreb; Split; Dubrovnik; Sarajevo; Belgrade; Sofia; Bucharest; Kyiv; Moscow; Saint Petersburg; Tbilisi;
Yerevan; Ankara; Izmir; Jerusalem; Amman; Beirut; Dubai; Muscat; Tehran; Delhi; Jaipur; Agra; Kolkata;
Chennai; Goa; Kathmandu; Colombo; Yangon; Hanoi; Saigon; Phnom Penh; Kuala Lumpur; Penang; Jakarta; Bali;
Manila; Taipei; Hong Kong; Shanghai; Xi'an; Chengdu; Osaka; Nara; Hiroshima; Sapporo; Okinawa; Busan;
Melbourne; Brisbane; Perth; Adelaide; Hobart; Auckland; Wellington; Queenstown; Honolulu; Anchorage;
Vancouver; Calgary; Toronto; Ottawa; Quebec; Halifax; Boston; Philadelphia; Washington; Baltimore;
Pittsburgh; Detroit; Cleveland; Nashville; Memphis; New Orleans; Atlanta; Charleston; Savannah; Miami;
Orlando; Key West; Houston; Austin; San Antonio; Santa Fe; Denver; Phoenix; Las Vegas; Los Angeles; San
Diego; Portland; Seattle; Yellowstone; Yosemite; Death Valley; Niagara Falls; the Everglades; Oaxaca;
Cancun; Havana; San Juan; Cartagena; Bogota; Quito; Cusco; La Paz; Santiago; Valparaiso; Patagonia;
Montevideo; Brasilia; Salvador; Dakar; Accra; Lagos; Addis Ababa; Kigali; Kampala; Dar es Salaam; Victoria
Falls; Windhoek; Johannesburg; Durban; Tunis; Algiers; Casablanca; Fez; Luxor; Alexandria; Cornwall; the
Lake District; York; Bath; Oxford; Cambridge; Brighton; Liverpool; Manchester; Glasgow; Belfast; Dublin;
Galway; Cork; the Isle of Skye; Provence; Tuscany; Sicily; Sardinia; Corsica; Crete; Santorini; Mallorca;
the Azores; Madeira; the Canary Islands; Lapland; the Black Forest; the Dolomites; the Pyrenees; the
Carpathians; the Andes; the Rockies; the Gobi; the Outback; the Galapagos; Tahiti; Bora Bora; Antarctica"""

SKILLS = """the piano; the violin; the drums; the flute; the cello; the ukulele; the harmonica; French;
German; Italian; Japanese; Chinese; Arabic; Russian; Portuguese; Korean; Latin; sign language; Morse code;
calligraphy; pottery; woodworking; welding; origami; juggling; magic tricks; chess openings; poker; salsa;
ballet; tap dancing; karate; judo; fencing; archery; tennis; golf; squash; badminton; volleyball; skiing;
snowboarding; ice skating; surfing; sailing; rowing; kayaking; scuba diving; rock climbing; horse riding;
skateboarding; yoga; tai chi; singing; public speaking; touch typing; speed reading; mental arithmetic;
algebra; statistics; Python; SQL; web design; photo editing; animation; watercolour painting; oil painting;
sketching; knitting; crochet; embroidery; sewing; cooking Italian food; cooking Indian food; baking bread;
cake decorating; barbecuing; fermenting vegetables; brewing beer; making cheese; making candles; making
soap; beekeeping; birdwatching; stargazing; foraging; fishing; bonsai; first aid; car repair; plumbing;
bookkeeping"""

ACTIVITIES = """growing roses; growing herbs on a balcony; pruning trees; building a shed; laying tiles;
hanging wallpaper; repairing a leaking tap; unblocking a drain; sharpening knives; refinishing furniture;
decluttering a garage; doing laundry; ironing shirts; washing windows; planning weekly meals; shopping for
groceries; cooking for a large family; packing lunches; feeding a baby; choosing a school; helping with
homework; talking to teenagers; caring for an elderly parent; choosing a nursing home; writing a will;
buying a house; renting a flat; finding a roommate; moving abroad; applying for a visa; opening a bank
account; paying off debt; investing in shares; planning for retirement; filing taxes; choosing health
insurance; asking for a raise; changing careers; quitting a job; finding a mentor; writing a cover letter;
building a portfolio; networking at conferences; hiring an employee; firing an employee; giving feedback;
leading a workshop; writing minutes; managing a project; setting goals; keeping a budget; running a bakery;
opening a cafe; selling crafts online; writing a business plan; naming a company; designing a logo; starting
a blog; growing a newsletter; recording music; filming a short film; taking portraits; organising photos;
tracing a family tree; writing memoirs; writing poetry; writing a screenplay; publishing a book; joining a
book club; learning a poem by heart; visiting a museum; going to the opera; planning a road trip;
backpacking through Europe; travelling with a toddler; travelling alone; flying for the first time; sleeping
in a tent; crossing a desert; climbing a volcano; cycling to work; training for a triathlon; losing weight;
gaining muscle; stretching every morning; quitting smoking; drinking less coffee; eating less sugar; going
vegetarian; cooking without waste; composting at home; saving water; saving energy; insulating an attic;
installing solar panels; choosing an electric car; changing a tyre; driving in snow; parking in a city;
learning to drive; riding a motorcycle; adopting a cat; walking a dog; keeping an aquarium; breeding
rabbits; rescuing a hedgehog; watching the stars; collecting stamps; restoring old books; solving
crosswords; playing video games less; using a phone less; spending less time online; backing up a computer;
setting up a home network; choosing a laptop; building a computer; securing a password; avoiding scams;
selling a used phone; throwing a birthday party; planning a picnic; organising a charity run; decorating for
winter; choosing a present; writing a toast; making small talk; going on a first date; ending a
relationship; saying sorry; dealing with a noisy neighbour; coping with loss; overcoming shyness;
controlling anger; waking up early; falling asleep faster; dealing with jet lag; preparing for surgery;
visiting the dentist; donating blood; learning from mistakes; making decisions; thinking critically;
remembering names; taking notes; writing an essay; preparing a debate; choosing a university; living in a
dormitory; studying abroad; writing a thesis; reading scientific papers; giving a lecture; teaching online;
tutoring maths; coaching football"""

WHO = """baker; sailor; painter; teacher; doctor; thief; king; queen; farmer; librarian; astronaut; pilot;
nurse; detective; gardener; postman; tailor; cook; magician; soldier; robot; ghost; dragon; fox; bear; cat;
dog; crow; turtle; mouse; spider; whale; tree; puppet; statue; princess; pirate; monk; fisherman; shepherd;
violinist; dancer; poet; carpenter; blacksmith; taxi driver; train conductor; grandfather; orphan; inventor;
scientist; mayor; wizard; witch; giant; elf; mermaid; vampire; snail; owl; horse; penguin; beekeeper; clown;
judge; spy; explorer; photographer; watchmaker; innkeeper"""

TRAITS = """who cannot lie; who lost a shadow; who is afraid of the dark; who collects old letters; who
never sleeps; in a city without colours; on the last day of autumn; who speaks with the wind; who found a
hidden door; with a broken heart; who wants to see the sea; who counts the stars; lost in a snowstorm; who
hears the future; who inherits a strange house; with an unusual neighbour; who travels by balloon; in search
of a lost brother; who wins a strange prize; who is late for everything; at the end of the world; who keeps
a secret garden; who forgot the way home; on a haunted island; who plays chess with death; who falls in love
by mistake; in a village under the sea; who can stop time for a minute; with too many umbrellas; who writes
letters to the moon"""

DISHES = """{} soup; {} salad; {} curry; {} risotto; {} pasta; {} pie; {} stew; {} sandwiches; roasted {};
grilled {}; {} casserole; {} tacos; {} omelettes; pickled {}; {} fritters"""
FILLINGS = """mushroom; tomato; chicken; potato; spinach; carrot; pumpkin; lentil; bean; fish; shrimp; beef;
pork; tofu; eggplant; courgette; pepper; onion; leek; cauliflower; broccoli; cabbage; beetroot; pea; corn;
asparagus"""
SWEETS = """{} cake; {} ice cream; {} muffins; {} tart; {} pancakes; {} jam; {} pudding; {} cookies; {}
smoothies; {} crumble"""
FRUITS = """apple; pear; plum; cherry; strawberry; raspberry; blueberry; banana and nut; lemon; orange;
mango; pineapple; peach; apricot; fig; coconut; chocolate; vanilla; hazelnut; almond; ginger; cinnamon;
carrot; rhubarb"""
FOODS = """paella; ratatouille; moussaka; lasagne; gnocchi; goulash; borscht; pierogi; schnitzel;
sauerkraut; pretzels; croissants; baguettes; crepes; quiche; fondue; raclette; bouillabaisse; tapas;
gazpacho; churros; falafel; tabbouleh; baba ghanoush; shakshuka; couscous; tagine; injera; jollof rice;
biryani; samosas; naan; dal; tikka masala; pad thai; pho; spring rolls; satay; laksa; nasi goreng; bibimbap;
kimchi; tempura; miso soup; okonomiyaki; congee; mapo tofu; dim sum; peking duck; burritos; enchiladas;
quesadillas; tamales; mole; ceviche; empanadas; arepas; feijoada; gumbo; jambalaya; clam chowder; cornbread;
meatloaf; burgers; hot dogs; macaroni and cheese; pulled pork; coleslaw with apples; shepherd's pie; scones;
Yorkshire pudding; porridge; baked beans; brownies; doughnuts; waffles; cupcakes; macarons; tiramisu; panna
cotta; baklava; gingerbread; shortbread; fudge; marshmallows; popcorn; crackers; pesto; mayonnaise; ketchup;
salsa; mustard; hollandaise; iced tea; hot chocolate; cold brew coffee; ginger beer; kombucha; mulled wine;
eggnog; milkshakes"""

DEEDS = """asking for; cancelling; confirming; postponing; complaining about; thanking somebody for;
apologising for; announcing; enquiring about; recommending"""
MATTERS = """a dentist's appointment; a hotel booking; a school trip; a lost parcel; a birthday party; a
piano lesson; a product launch; a budget report; a training course; a job offer; a company picnic; a noisy
party; a wrong invoice; a late train; a charity event; a new website; a software update; a gym membership; a
magazine subscription; a library book; a wedding present; a house viewing; a car repair; a delayed flight; a
research grant; a guest lecture; a parking permit; a broken lift"""

NOUNS = """a list of numbers; a list of words; a string; a sentence; a matrix; a dictionary; a text file; a
CSV file; a JSON document; a log file; a list of dates; a list of prices; a list of temperatures; a list of
names; a list of tuples; a linked list; a binary tree; a graph; a stack; a set of integers; a URL; a file
path; a phone number; an IP address; a list of students and grades; a shopping cart; a bank account; an
inventory; a playlist; a calendar"""
VERBS = """reads {} from the user and prints a summary; validates {}; sorts {}; reverses {}; prints {} in a
table; counts the items in {}; finds the largest item in {}; finds the most common item in {}; removes empty
items from {}; searches {} for a given value; splits {} into two halves; copies {}; compares {} with
another; saves {} to disk; loads {} from disk; converts {} to upper case where possible; filters {} by a
condition; groups {} by length; shuffles {}; returns every second item of {}; converts {} to a string;
checks whether {} is empty; merges {} with another; picks a random item of {}"""


def each(forms: str, fillings: str) -> Iterator[str]:
    """Every form of one list with every filling of another."""
    return (form.format(filling) for form, filling in product(topics(forms), topics(fillings)))


FOUND: dict[str, list[str]] = {
    "concepts": topics(CONCEPTS),
    "technology": topics(TECHNOLOGY),
    "history": topics(HISTORY),
    "places": topics(PLACES),
    "activities": [*topics(ACTIVITIES), *(f"learning {skill}" for skill in topics(SKILLS))],
    "characters": [
        f"{'an' if who[0] in 'aeiou' else 'a'} {who} {trait}"
        for who, trait in product(topics(WHO), topics(TRAITS))
    ],
    "foods": [*topics(FOODS), *each(DISHES, FILLINGS), *each(SWEETS, FRUITS)],
    "occasions": [f"{deed} {matter}" for deed, matter in product(topics(DEEDS), topics(MATTERS))],
    "tasks": list(each(VERBS, NOUNS)),
}
KNOWN = {topic for known in TOPICS.values() for topic in known}
MORE = {name: [topic for topic in found if topic not in KNOWN] for name, found in FOUND.items()}
