"""Sentences of a generated mailbox that state nothing, and newsletters."""

FILLERS = (
    "I hope you had a good weekend.", "Sorry for the late answer.", "I am in meetings for the rest of the day.",
    "Tell me if anything is unclear.", "We can go through the details on Thursday.", "The team did good work here.",
    "I have put everything else on the shared drive.", "Please do not pass this on outside the company.",
    "I will be back at my desk tomorrow morning.", "Some points are still open, but they can wait.",
)  # fmt: skip
REPLIES = (
    "Thank you, that helps.", "Noted.", "Thanks, I will pass it on.", "All right.", "Good to know.",
    "Thank you. I will come back to you if I have questions.", "Fine with me.", "Got it, thanks for the quick answer.",
    "Let us talk about it over lunch.", "I have added it to my notes.",
)  # fmt: skip
TALK = (
    ("Lunch on Friday", "Shall we try the new place at the corner on Friday?"),
    ("Parking", "The lower deck of the garage is closed this week."),
    ("Network maintenance", "The network will be slow on Saturday between two and four."),
    ("Parcel at the reception", "There is a parcel at the reception with no name on it."),
    ("Weekly meeting", "I have moved our weekly meeting to the small room."),
    ("Minutes of the meeting", "Here is what we talked about. Nothing was decided."),
    ("Draft of the report", "I have read the draft and left some remarks at the margin."),
    ("Holiday plans", "Please enter your holidays in the calendar by the end of the month."),
    ("Coffee machine", "The coffee machine on our floor works again."),
    ("Budget round", "The budget round starts soon. Please collect what you need."),
    ("Travel rules", "Please book a hotel early and keep the receipts of each trip."),
    ("Invoices", "Two invoices have no order number. Please look for yours."),
    ("Welcome", "A new colleague starts on Monday. Please say hello."),
    ("Keys", "I have found some keys in the meeting room."),
    ("Presentation", "Could you look at my slides before the customer comes?"),
    ("Deadline of the survey", "The survey about the canteen closes soon, please take part."),
)  # fmt: skip
NEWS = (
    ("Five ideas for better meetings", "Begin on time, end on time, and leave the phones outside. Read more online."),
    ("This month in logistics", "Freight rates were stable, and the ports expect a calm summer. Read more online."),
    ("Your office, greener", "Plants make an office quieter. See our offers for the spring. Discount codes inside."),
    ("The hotel letter", "New houses have opened in many towns. Book early for the best rooms."),
    ("Contracts explained", "What to look for before a contract is signed, in three minutes."),
)  # fmt: skip
