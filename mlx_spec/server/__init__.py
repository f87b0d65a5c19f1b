"""A server of chats over one engine: OpenAI's and Anthropic's HTTP interfaces, and a chat page."""
