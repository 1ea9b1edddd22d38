"""What do the children of the process tests start with? nixl, which takes seconds to load, and no agent."""

from services.transfer.nixl_library import Library

Library()
