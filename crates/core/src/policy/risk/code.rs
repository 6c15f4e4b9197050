//! Programs in other languages inside a command line (`python -c …`). They are not parsed; only words are searched
//! for that show that the program does more than compute.

use super::super::path::{PathLocation, locate_path};
use super::super::sensitive::is_secret_variable;

/// Words that show that a program removes, runs, sends or hides something.
const SUSPICIOUS_WORDS: &[&str] = &[
    "rmtree",
    "unlink",
    "os.remove",
    "os.rmdir",
    "removedirs",
    "rmsync",
    "rmdirsync",
    "rimraf",
    "fs.rm",
    "file.delete",
    "fileutils",
    "os.system",
    "os.exec",
    "os.popen",
    "os.kill",
    "subprocess",
    "pty.spawn",
    "child_process",
    "execsync",
    "spawnsync",
    "system(",
    "system \"",
    "system '",
    "shell_exec",
    "popen",
    "eval(",
    "exec(base64",
    "b64decode",
    "atob(",
    "__import__",
    "ctypes",
    "socket",
    "urllib",
    "urlopen",
    "requests.",
    "httpx",
    "aiohttp",
    "http.client",
    "net::http",
    "lwp::",
    "fetch(",
    "https://",
    "http://",
];

/// Whether a program may do harm, as far as its text shows.
pub(super) fn is_harmful(program: &str, workspace: Option<&str>) -> bool {
    let lower = program.to_ascii_lowercase();
    if SUSPICIOUS_WORDS.iter().any(|word| lower.contains(word)) {
        return true;
    }
    let names = program.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    if names
        .into_iter()
        .any(|name| name == name.to_ascii_uppercase() && name.contains('_') && is_secret_variable(name))
    {
        return true;
    }
    let writes = ["'w", "\"w", "'a'", "\"a\"", "write", ">"].iter().any(|word| lower.contains(word));
    program.split(['\'', '"', '`']).any(|text| match locate_path(text, workspace) {
        // Code contains spaces, paths in code hardly ever do.
        _ if text.is_empty() || text.contains(char::is_whitespace) => false,
        PathLocation::Secret => true,
        PathLocation::Outside | PathLocation::System => writes && text.contains('/'),
        PathLocation::Inside | PathLocation::NullDevice | PathLocation::Unclear => false,
    })
}

#[cfg(test)]
mod tests {
    use super::is_harmful;

    #[test]
    fn a_program_that_does_more_than_compute_is_noticed() {
        for program in [
            "import shutil; shutil.rmtree('x')",
            "require('child_process').execSync('x')",
            "open('/etc/hosts', 'w')",
            "open('.env').read()",
            "print(os.environ['GITHUB_TOKEN'])",
        ] {
            assert!(is_harmful(program, None), "{program}");
        }
        for program in ["print(1 + 1)", "import json; print(json.load(open('x.json')))", "console.log(1)"] {
            assert!(!is_harmful(program, None), "{program}");
        }
    }
}
