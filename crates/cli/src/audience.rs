//! Ends without a word when nobody reads any more, as in `trainyard plan … | head`.

use std::panic;
use std::process;

/// What a shell makes of a program that SIGPIPE ended.
const NOBODY_READS: i32 = 141;

/// From here on, printing to a closed pipe ends the program instead of panicking.
///
/// `SIGPIPE` itself stays ignored: a launcher must outlive the terminal it was started in.
pub fn may_leave() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let words = panic.payload().downcast_ref::<String>();
        if words.is_some_and(|words| is_closed_pipe(words)) {
            process::exit(NOBODY_READS);
        }
        usual(panic);
    }));
}

/// The words of `println!`, which has no other way to tell.
fn is_closed_pipe(words: &str) -> bool {
    words.starts_with("failed printing to stdout") && words.contains("Broken pipe")
}
