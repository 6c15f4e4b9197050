#compdef qd
# Zsh completion of qd, printed by `qd completions zsh`. Each Tab runs `qd __complete`, which prints a line for each
# candidate: the value, a tab, a description.
_qd() {
    local -a lines values directories
    local line value found=1
    lines=("${(@f)$(qd __complete zsh $((CURRENT - 1)) "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    for line in "${lines[@]}"; do
        value=${line%%$'\t'*}
        [[ -n $value ]] || continue
        # A colon separates value and description.
        if [[ $value == */ ]]; then
            directories+=("${value//:/\\:}")
        else
            values+=("${value//:/\\:}:${line#*$'\t'}")
        fi
    done
    (( $#values )) && _describe -V 'qd' values && found=0
    (( $#directories )) && _describe -V 'directory' directories -S '' && found=0
    return found
}
if [[ $funcstack[1] == _qd ]]; then
    _qd "$@"
else
    compdef _qd qd
fi
