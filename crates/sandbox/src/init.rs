//! The first process of a sandbox, which `qd __sandbox` runs as pid 1 of the sandbox's PID namespace. It arranges the
//! files, adopts orphans, and does nothing else: when it dies, the kernel ends everything in its namespace. Root inside
//! can read its memory, so it is a program of its own with no secret, no environment and no open descriptor.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use qd_protocol::sandbox::{NetworkSetting, SandboxLevel};
use qd_protocol::sandbox_spec::MODEL_PROXY_PORT;
use rustix::net::SendFlags;
use rustix::process::{Signal, WaitOptions, geteuid, set_parent_process_death_signal, setpgid, waitpid};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use crate::confined_run;
use crate::descriptor_passing::send_with_descriptors;
use crate::error::SandboxError;
use crate::id_map::write_id_maps;
use crate::kernel;
use crate::keyrings::refuse_keyrings;
use crate::mounts::mount_all;
use crate::plan::SandboxPlan;
use crate::probe;

/// The argument that makes `qd` run this.
pub const SANDBOX_COMMAND: &str = "__sandbox";
/// Our own pid, as this namespace counts.
const OWN_PID: u32 = 1;

/// What the init replies to its plan, as one line of JSON. The listener for the proxy to the model comes with its first
/// byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum InitReply {
    Ready,
    Failed(SandboxError),
}

/// Runs the init, or something that starts one. Must be called before the program does anything else.
pub fn main() -> ExitCode {
    match std::env::args().nth(2).as_deref() {
        Some(probe::PROBE_ARGUMENT) => return probe::main(),
        Some(confined_run::RUN_ARGUMENT) => return confined_run::main(),
        _ => {}
    }
    // None of our names can fail, and nothing depends on it.
    let _result = rustix::thread::set_name(c"qd-sandbox");
    match run() {
        Ok(never) => match never {},
        Err(_) => ExitCode::FAILURE,
    }
}

/// Receives the plan on standard input, carries it out, replies there, and stays.
fn run() -> io::Result<std::convert::Infallible> {
    // The process that started us could have died before this call. Then nobody takes our reply.
    end_with_parent()?;
    // A group of its own in the session of the process that started us: a program that needs a session of its own can
    // join it, and so cease to lead a group.
    setpgid(None, None)?;
    let socket = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = String::new();
    BufReader::new(&socket).read_line(&mut line)?;
    let plan: SandboxPlan = serde_json::from_str(&line)?;
    let (reply, model_listener) = match set_up(&plan) {
        Ok(listener) => (InitReply::Ready, listener),
        Err(error) => (InitReply::Failed(error), None),
    };
    kernel::ignore_child_exits();
    send_reply(&socket, &reply, model_listener)?;
    if reply != InitReply::Ready {
        return Err(io::ErrorKind::Other.into());
    }
    kernel::close_descriptors_from(0)?;
    loop {
        rustix::event::pause();
    }
}

/// Arranges everything that the plan names. Returns the listener for the proxy to the model, if there is to be one.
fn set_up(plan: &SandboxPlan) -> Result<Option<TcpListener>, SandboxError> {
    if plan.network == NetworkSetting::Off {
        kernel::start_loopback().map_err(|error| SandboxError::network(&error))?;
    }
    let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, MODEL_PROXY_PORT));
    let model_listener = plan.has_model_proxy.then(listen).transpose();
    let model_listener = model_listener.map_err(|error| SandboxError::model_proxy(&error))?;
    mount_all(plan).map_err(|error| SandboxError::mount(&error))?;
    if geteuid().is_root() {
        lock_mounts().map_err(|error| SandboxError::user_namespace(&error))?;
    }
    // The old directory may be one that is hidden now.
    rustix::process::chdir("/").map_err(|error| SandboxError::internal(&error.into()))?;
    end_with_parent().map_err(|error| SandboxError::internal(&error))?;
    if plan.level == SandboxLevel::Workspace {
        // Root inside could otherwise have this process use them.
        refuse_keyrings().map_err(|error| SandboxError::internal(&error))?;
    }
    Ok(model_listener)
}

fn send_reply(mut socket: &File, reply: &InitReply, model_listener: Option<TcpListener>) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let descriptors: Vec<OwnedFd> = model_listener.into_iter().map(OwnedFd::from).collect();
    let sent = send_with_descriptors(socket, &line, &descriptors, SendFlags::empty())?;
    socket.write_all(line.get(sent..).unwrap_or_default())
}

fn end_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Moves into a second user namespace, from which nothing that was mounted in the first can be undone: root would
/// otherwise have all rights over it. Ordinary users lose theirs anyway, when they start a program.
fn lock_mounts() -> io::Result<()> {
    let (mut moved, mut we_moved) = io::pipe()?;
    #[expect(unsafe_code, reason = "the maps must be written by another process")]
    // SAFETY: the init is one thread.
    let helper = unsafe { kernel::clone_process(0) }?;
    let Some(helper) = helper else {
        drop(we_moved);
        let written = moved.read_exact(&mut [0]).and_then(|()| write_id_maps(OWN_PID));
        kernel::exit_now(if written.is_ok() { 0 } else { 1 });
    };
    #[expect(unsafe_code, reason = "rustix has no safe call for any kind of namespace")]
    // SAFETY: descriptors stay shared, and there is one thread.
    let unshared = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) };
    if unshared.is_ok() {
        we_moved.write_all(&[1])?;
    }
    drop(we_moved);
    let helper = i32::try_from(helper).ok().and_then(rustix::process::Pid::from_raw);
    let status = waitpid(helper, WaitOptions::empty())?.and_then(|(_, status)| status.exit_status());
    unshared?;
    if status == Some(0) { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}
