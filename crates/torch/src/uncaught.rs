//! What ends a process without an error that Rust could return: an exception in a thread of Gloo or libtorch, or a
//! panic.

use std::panic;

use crate::bridge::ffi;
use crate::error::without_backtrace;

/// From now on, an exception that nothing catches ends the process with a message and exit code 1, not with SIGABRT,
/// and the message of a panic lacks libtorch's C++ backtrace. Programs call it first in `main`.
pub fn report() {
    ffi::report_uncaught_exceptions();
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let message = info.payload_as_str().unwrap_or_default();
        let short = without_backtrace(message);
        if short == message {
            return usual(info);
        }
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        match info.location() {
            Some(at) => eprintln!("thread '{name}' panicked at {at}:\n{short}"),
            None => eprintln!("thread '{name}' panicked:\n{short}"),
        }
    }));
}

/// Throws an exception in a thread of its own, as libtorch may, which ends the process: to try what [`report`] prints.
pub fn throw_in_thread(message: &str, is_out_of_memory: bool) {
    ffi::throw_in_thread(message, is_out_of_memory);
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CASE: &str = "TRAINYARD_TEST_UNCAUGHT";

    /// Not a test of its own: what the other test runs in another process.
    #[test]
    fn end_by_an_exception() {
        match std::env::var(CASE).as_deref() {
            Ok("panic") => {
                report();
                panic!(
                    "bad shape\nException raised from f at g.cc:1 (most recent call first):\nframe #0"
                );
            }
            Ok(case) => {
                report();
                throw_in_thread("no such device", case == "memory");
            }
            Err(_) => {}
        }
    }

    fn stderr_of(case: &str) -> (Option<i32>, String) {
        let ended = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "uncaught::tests::end_by_an_exception",
                "--nocapture",
            ])
            .env(CASE, case)
            .env("RANK", "3")
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
        (ended.status.code(), stderr)
    }

    #[test]
    fn uncaught_exceptions_are_reported_without_a_backtrace() {
        let (code, stderr) = stderr_of("exception");
        assert_eq!(code, Some(1), "{stderr}");
        assert!(
            stderr
                .contains("error: rank 3: an exception ended a thread of libtorch: no such device"),
            "{stderr}"
        );
        let (code, memory) = stderr_of("memory");
        assert_eq!(code, Some(1), "{memory}");
        assert!(
            memory.contains("rank 3: the host is out of memory"),
            "{memory}"
        );
        let (_, panic) = stderr_of("panic");
        assert!(panic.contains("bad shape"), "{panic}");
        for message in [stderr, memory, panic] {
            assert!(!message.contains("frame #"), "{message}");
        }
    }
}
