"""Basics that every process uses: settings, logs, clocks, start-up errors, and facts about its machine."""
