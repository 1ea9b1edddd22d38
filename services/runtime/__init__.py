"""What every process needs: settings, logs, clocks, start-up errors, and facts about its machine."""
