"""What a tiny model is shown before `train.py`: play of somebody who knows the tools but often takes the wrong step.

art tiny-model ./tiny --task warm_up:MailAgent

The play is that of the task `search_emails`, with the tools as this agent describes them in every request.
"""

import random
from dataclasses import replace

from agent import make_tools
from langchain_core.utils.function_calling import convert_to_openai_tool

from art.task import Conversation
from art.tasks.search_emails import SearchEmails, open_desk


class MailAgent(SearchEmails):
    name = "langgraph_mail_agent"

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        tools = [convert_to_openai_tool(tool) for tool in make_tools(open_desk(0, 0))]
        return [
            replace(conversation, tools=tools if conversation.messages[0]["role"] == "system" else None)
            for conversation in super().warm_start_conversations(rng, count)  # without a system message it is a drill
        ]
