//! Exits silently if the reader of stdout is gone, as in `trainyard plan … | head`.

use std::panic;
use std::process;

/// The exit code of a program that SIGPIPE ended, as shells report it.
const SIGPIPE_EXIT_CODE: i32 = 141;

/// Makes printing to a closed pipe exit the program instead of panicking.
///
/// `SIGPIPE` stays ignored, because a launcher must outlive its terminal.
pub fn exit_silently() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        if message.is_some_and(|message| is_closed_pipe(message)) {
            process::exit(SIGPIPE_EXIT_CODE);
        }
        usual(panic);
    }));
}

/// Whether this is the panic message of `println!` on a closed pipe; there is no other way to detect it.
fn is_closed_pipe(message: &str) -> bool {
    message.starts_with("failed printing to stdout") && message.contains("Broken pipe")
}
