//! In a terminal, look after look, until whoever watches has seen enough.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{Event, KeyCode, KeyModifiers, poll, read};

use super::screen;
use super::view::JobView;

/// How long a look may lie there before it is shown.
const GLANCE: Duration = Duration::from_millis(100);
const PAGE: i16 = 10;

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wish {
    Leave,
    /// By so many lines, down if positive.
    Scroll(i16),
}

/// Shows what is seen, every so often.
pub fn show<F>(interval: Duration, look: F) -> io::Result<()>
where
    F: Fn() -> Vec<JobView> + Send + 'static,
{
    let (tell, looks) = channel();
    // A look may wait for a machine that does not answer; keys must not wait for that.
    thread::spawn(move || {
        while tell.send(look()).is_ok() {
            thread::sleep(interval);
        }
    });
    let mut terminal = ratatui::try_init()?;
    let shown = until_left(&mut terminal, &looks);
    ratatui::try_restore()?;
    shown
}

/// Drawn is what is new: a look, or what a key asks for, or a terminal of another size.
fn until_left(terminal: &mut DefaultTerminal, looks: &Receiver<Vec<JobView>>) -> io::Result<()> {
    let (mut jobs, mut first_line) = (None, 0u16);
    loop {
        let event = poll(GLANCE)?.then(read).transpose()?;
        let look = looks.try_iter().last();
        if event.is_none() && look.is_none() {
            continue;
        }
        match event.as_ref().and_then(wish) {
            Some(Wish::Leave) => return Ok(()),
            Some(Wish::Scroll(lines)) => first_line = first_line.saturating_add_signed(lines),
            None => {}
        }
        jobs = look.or(jobs);
        if let Some(jobs) = &jobs {
            terminal.draw(|frame| first_line = screen::draw(jobs, first_line, frame))?;
        }
    }
}

fn wish(event: &Event) -> Option<Wish> {
    let key = event.as_key_press_event()?;
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Some(Wish::Leave),
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Wish::Leave),
        KeyCode::Down | KeyCode::Char('j') => Some(Wish::Scroll(1)),
        KeyCode::Up | KeyCode::Char('k') => Some(Wish::Scroll(-1)),
        KeyCode::PageDown => Some(Wish::Scroll(PAGE)),
        KeyCode::PageUp => Some(Wish::Scroll(-PAGE)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn keys_as_everywhere() {
        let pressed = |code, with| wish(&Event::Key(KeyEvent::new(code, with)));
        let (none, control) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
        assert_eq!(pressed(KeyCode::Char('q'), none), Some(Wish::Leave));
        assert_eq!(pressed(KeyCode::Char('c'), control), Some(Wish::Leave));
        assert_eq!(pressed(KeyCode::Char('c'), none), None);
        assert_eq!(pressed(KeyCode::PageUp, none), Some(Wish::Scroll(-PAGE)));
        assert_eq!(wish(&Event::Resize(80, 25)), None, "it is drawn anew");
    }
}
