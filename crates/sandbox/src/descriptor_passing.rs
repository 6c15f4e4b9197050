//! Passes open descriptors to another process over a unix socket. They travel with the first byte of what is sent.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// How many descriptors may travel together.
const TOGETHER_MAX: usize = 3;

/// Sends the descriptors and as many of the bytes as fit, and returns how many those are.
pub fn send_with_descriptors(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[OwnedFd],
    flags: SendFlags,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TOGETHER_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    // The space is rounded up, but the other end has room for no more.
    let fits = borrowed.len() <= TOGETHER_MAX
        && (borrowed.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
    if !fits {
        return Err(io::Error::other(format!(
            "more than {TOGETHER_MAX} descriptors cannot be passed together"
        )));
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags | SendFlags::NOSIGNAL)?)
}

/// Receives bytes and the descriptors that came with them. No bytes mean that the other end is closed.
pub fn receive_with_descriptors(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TOGETHER_MAX))];
    loop {
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(bytes)];
        let received = match recvmsg(&socket, slices, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            received => received?.bytes,
        };
        let descriptors = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        return Ok((received, descriptors.flatten().collect()));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_come_with_the_bytes_that_they_were_sent_with() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        assert_eq!(send_with_descriptors(&ours, b"one", &[writer.into()], SendFlags::empty()).unwrap(), 3);
        let mut bytes = [0; 8];
        let (read, mut descriptors) =
            receive_with_descriptors(&theirs, &mut bytes, RecvFlags::empty()).unwrap();
        assert_eq!((&bytes[..read], descriptors.len()), (b"one".as_slice(), 1));
        std::fs::File::from(descriptors.remove(0)).write_all(b"through it").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through it");
    }

    #[test]
    fn a_closed_end_is_no_bytes_and_no_descriptors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        let (read, descriptors) = receive_with_descriptors(&theirs, &mut [0; 8], RecvFlags::empty()).unwrap();
        assert_eq!((read, descriptors.len()), (0, 0));
    }

    #[test]
    fn too_many_descriptors_are_an_error() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let many: Vec<OwnedFd> = (0..=TOGETHER_MAX).map(|_| ours.try_clone().unwrap().into()).collect();
        assert!(send_with_descriptors(&ours, b"x", &many, SendFlags::empty()).is_err());
    }
}
