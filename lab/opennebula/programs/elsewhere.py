"""Runs a command on another machine. Arguments: the words that lead there, as JSON, and the command's."""

import json
import os
import shlex
import sys

words = json.loads(sys.argv[1])
os.execvp(words[0], [*words, shlex.join(sys.argv[2:])])
