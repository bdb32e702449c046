"""Threads about everyday business, with the questions that they answer.

write_approval     one of several people approves an order
write_invitation   people say whether they come, and some change their minds
write_order        a number in one email, the day of delivery of that number in another
write_quote        a price in an attachment, and perhaps a revised one
"""

from __future__ import annotations

from art.tasks.mail_search.generator.facts import ITEMS, draw_day, draw_order, draw_workshop
from art.tasks.mail_search.generator.letters import Draft
from art.tasks.mail_search.generator.people import Person
from art.tasks.mail_search.generator.threads import Pen, Written, add_chatter
from art.tasks.mail_search.questions import Question

YES = ("Count me in.", "I will be there.", "Yes, I am coming.")
NO = ("Sorry, I cannot make it.", "I have to say no this time.")
YES_AFTER_ALL, NO_AFTER_ALL = "Good news, I can come after all.", "I am sorry, I cannot come after all."


def write_approval(pen: Pen) -> Written:
    office, rng = pen.office, pen.rng
    order = pen.draw(draw_order)
    asking, other, approving = rng.sample([office.owner, *office.draw_people(3)], 3)
    amount = f"{rng.randrange(5, 90) * 100:,} EUR"
    request = f"I need an approval for {order}, which cost {amount}."
    thread = [
        office.start(asking, [other, approving], f"Approval for {order}", [request, "Can one of you look at it?"])
    ]
    if rng.random() < 0.7:
        doubt = f"I have no objection to {order}, but {approving.first} has to decide."
        thread.append(office.reply(thread[-1], other, [doubt]))
    thread.append(office.reply(thread[-1], approving, [f"I approve {order}.", "Please go ahead."]))
    source = thread[-1]
    add_chatter(pen, thread, [asking, other])
    question = Question(
        text=f"Who approved {order}?", kind="name", answer=approving.name, wrong=[other.name], level="medium",
        keywords=[order.removeprefix("the "), "approve"],
    )  # fmt: skip
    return Written([thread], [(question, [source])])


def write_invitation(pen: Pen) -> Written:
    office, rng = pen.office, pen.rng
    workshop = pen.draw(draw_workshop)
    host, *guests = office.draw_people(rng.randint(5, 9))
    text = f"You are invited to {workshop}. Please reply to all whether you come."
    invitation = office.start(host, [office.owner, *guests], f"Invitation to {workshop}", [text])
    thread, coming = [invitation], dict[Person, Draft]()
    last = invitation
    for guest in rng.sample(guests, len(guests)):
        comes = rng.random() < 0.7
        last = _reply_after(pen, last, invitation, guest, rng.choice(YES if comes else NO))
        thread.append(last)
        coming |= {guest: last} if comes else {}
    for guest in rng.sample(guests, 2):
        last = _reply_after(pen, last, invitation, guest, NO_AFTER_ALL if guest in coming else YES_AFTER_ALL)
        thread.append(last)
        if coming.pop(guest, None) is None:
            coming[guest] = last
    question = Question(
        text=f"How many people have replied that they come to {workshop}?", kind="number", answer=str(len(coming)),
        level="hard", keywords=[f"invited to {workshop}"],
    )  # fmt: skip
    return Written([thread], [(question, [*coming.values()])])


def write_order(pen: Pen) -> Written:
    office, rng = pen.office, pen.rng
    order, vendor = pen.draw(draw_order), office.draw_outsider()
    number = pen.draw(lambda rng: str(rng.randrange(10_000, 99_999)))
    buyer = rng.choice([office.owner, *office.draw_people(2)])
    reader = office.owner if buyer != office.owner else office.draw_people(1)[0]
    text = f"I have ordered {order} from {vendor.company} today. The order number is {number}."
    placed = office.start(buyer, [reader], f"Ordered: {order}", [text])
    day = draw_day(rng)
    text = f"Thank you for your order. Order {number} will be delivered on {day}."
    notices = [office.start(vendor, [buyer], f"Your order {number}", [text], after=placed.when)]
    wrong = []
    if rng.random() < 0.4:
        wrong, day = [day], pen.draw_value(lambda: draw_day(rng), {day})
        late = f"We are sorry that order {number} is late. It will now be delivered on {day}."
        notices.append(office.reply(notices[0], vendor, [late]))
    item = order.removeprefix("the ")
    asked_number = Question(
        text=f"What is the order number of {order}?", kind="code", answer=number, level="medium",
        keywords=[item, "ordered"],
    )  # fmt: skip
    asked_day = Question(
        text=f"When will {order} be delivered?", kind="date", answer=day, wrong=wrong, level="hard",
        keywords=[f"order {number}"],
    )  # fmt: skip
    return Written([[placed], notices], [(asked_number, [placed]), (asked_day, [notices[-1]])])


def write_quote(pen: Pen) -> Written:
    office, rng = pen.office, pen.rng
    order, vendor = pen.draw(draw_order), office.draw_outsider()
    prices: set[str] = set()

    def sheet(name: str) -> tuple[str, str]:
        price = pen.draw_value(lambda: f"{rng.randrange(12, 400)}.{rng.choice(('00', '50', '90'))}", prices)
        item, other = next(item for item in ITEMS if item in order), rng.choice(("delivery", "assembly"))
        rows = [f"{item},{order.split()[1]},{price}", f"{other},1,{rng.randrange(20, 90)}.00"]
        return price, "\n".join([f"[{name}.csv]", "item,quantity,price per piece in EUR", *rows])

    price, attachment = sheet("quote")
    sentences = [f"Thank you for asking about {order}.", "Our quote is attached."]
    thread = [office.start(vendor, [office.owner], f"Quote for {order}", sentences, attachments=attachment)]
    level = "medium"
    if rng.random() < 0.4:
        level = "hard"
        thread.append(office.reply(thread[0], office.owner, [f"Is that the best that you can do for {order}?"]))
        price, attachment = sheet("revised-quote")
        thread.append(
            office.reply(thread[-1], vendor, ["Please find a revised quote attached."], attachments=attachment)
        )
    question = Question(
        text=f"What is the price per piece in the newest quote for {order}?", kind="number", answer=f"{price} EUR",
        wrong=sorted(prices - {price}), level=level, keywords=["quote", order.removeprefix("the ")],
    )  # fmt: skip
    return Written([thread], [(question, [thread[-1]])])


def _reply_after(pen: Pen, last: Draft, parent: Draft, sender: Person, text: str) -> Draft:
    """Answer an email later than another answer to it."""
    answer = pen.office.reply(parent, sender, [text])
    answer.when = max(answer.when, pen.office.reply(last, sender, [text]).when)
    return answer
