//! How our processes write their logs: the daemon, workers and joined workers. A log must never end anything. Its disk
//! may be full, and then the line is lost, and nothing else.

use std::io::{self, Write};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::format::{DefaultFields, Format};
use tracing_subscriber::fmt::{MakeWriter, SubscriberBuilder};

/// A log in our format. The caller adds a filter and installs it.
pub fn log_to<M>(
    destination: M,
) -> SubscriberBuilder<DefaultFields, Format, LevelFilter, ForgivingLogDestination<M>>
where
    M: for<'a> MakeWriter<'a> + 'static,
{
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(ForgivingLogDestination(destination))
        // By default a line that could not be written is reported on stderr with `eprintln!`, which panics if stderr
        // cannot be written either, and that ends the task that logged.
        .log_internal_errors(false)
}

/// A destination of which nobody learns that a line could not be written.
#[derive(Debug)]
pub struct ForgivingLogDestination<M>(M);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for ForgivingLogDestination<M> {
    type Writer = ForgivingLogWriter<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        ForgivingLogWriter(self.0.make_writer())
    }
}

/// See [`ForgivingLogDestination`].
#[derive(Debug)]
pub struct ForgivingLogWriter<W>(W);

impl<W: Write> Write for ForgivingLogWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _lost: io::Result<()> = self.0.write_all(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _lost: io::Result<()> = self.0.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refuses every write, like a file on a full disk.
    #[derive(Debug)]
    struct FullDisk;

    impl Write for FullDisk {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::StorageFull.into())
        }
    }

    #[test]
    fn a_line_that_cannot_be_written_is_lost_and_nothing_else() {
        let mut writer = ForgivingLogDestination(|| FullDisk).make_writer();
        assert_eq!(writer.write(b"a line").unwrap(), 6);
        writer.flush().unwrap();
        let log = log_to(|| FullDisk).finish();
        tracing::subscriber::with_default(log, || tracing::error!("nobody reads this"));
    }
}
