"""Tools and environments as TRL takes them: functions, and objects whose methods are tools."""
