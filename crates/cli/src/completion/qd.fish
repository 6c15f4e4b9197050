# Fish completion of qd, printed by `qd completions fish`. Each Tab runs `qd __complete`, which prints a line for each
# candidate: the value, a tab, a description.
function __qd_complete
    set -l words (commandline --current-process --tokenize --cut-at-cursor)
    set -l current (commandline --current-token --cut-at-cursor)
    qd __complete fish (count $words) $words "$current" 2>/dev/null
end
complete --command qd --no-files --keep-order --arguments '(__qd_complete)'
