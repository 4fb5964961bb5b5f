//! The live view: redraws snapshots in a terminal until the user quits.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{Event, KeyCode, KeyModifiers, poll, read};

use super::screen;
use super::view::Snapshot;

/// How often to check for keys and new snapshots.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const PAGE: i16 = 10;

/// A key that the view reacts to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Key {
    Quit,
    /// Scrolls by this many lines, down if positive.
    Scroll(i16),
}

/// Shows a new snapshot every `interval`.
pub fn show<F>(interval: Duration, snapshot: F) -> io::Result<()>
where
    F: Fn() -> Snapshot + Send + 'static,
{
    let (sender, snapshots) = channel();
    // A snapshot may wait for a node that does not respond; keys must not wait for that.
    thread::spawn(move || {
        while sender.send(snapshot()).is_ok() {
            thread::sleep(interval);
        }
    });
    let mut terminal = ratatui::try_init()?;
    let shown = run(&mut terminal, &snapshots);
    ratatui::try_restore()?;
    shown
}

/// Redraws on a new snapshot, on a key and when the terminal is resized.
fn run(terminal: &mut DefaultTerminal, snapshots: &Receiver<Snapshot>) -> io::Result<()> {
    let (mut last, mut first_line) = (None, 0u16);
    loop {
        let event = poll(POLL_INTERVAL)?.then(read).transpose()?;
        let snapshot = snapshots.try_iter().last();
        if event.is_none() && snapshot.is_none() {
            continue;
        }
        match event.as_ref().and_then(key_of) {
            Some(Key::Quit) => return Ok(()),
            Some(Key::Scroll(lines)) => first_line = first_line.saturating_add_signed(lines),
            None => {}
        }
        last = snapshot.or(last);
        if let Some(last) = &last {
            terminal.draw(|frame| first_line = screen::draw(last, first_line, frame))?;
        }
    }
}

fn key_of(event: &Event) -> Option<Key> {
    let key = event.as_key_press_event()?;
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Quit),
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Key::Quit),
        KeyCode::Down | KeyCode::Char('j') => Some(Key::Scroll(1)),
        KeyCode::Up | KeyCode::Char('k') => Some(Key::Scroll(-1)),
        KeyCode::PageDown => Some(Key::Scroll(PAGE)),
        KeyCode::PageUp => Some(Key::Scroll(-PAGE)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn common_keys_quit_and_scroll() {
        let pressed = |code, with| key_of(&Event::Key(KeyEvent::new(code, with)));
        let (none, control) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
        assert_eq!(pressed(KeyCode::Char('q'), none), Some(Key::Quit));
        assert_eq!(pressed(KeyCode::Char('c'), control), Some(Key::Quit));
        assert_eq!(pressed(KeyCode::Char('c'), none), None);
        assert_eq!(pressed(KeyCode::PageUp, none), Some(Key::Scroll(-PAGE)));
        assert_eq!(key_of(&Event::Resize(80, 25)), None, "it is only redrawn");
    }
}
