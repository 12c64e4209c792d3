"""What a person sees of a coordinator, as plain records: for the command line, the administrators'
port and the live page alike."""
