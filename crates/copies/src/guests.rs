//! Who is connected to a holder, and how many at most.
//!
//! Somebody who has not proved anything yet costs a thread and a few hundred bytes. There are only a
//! few such places; when they are taken, the one who has been silent longest must go. So whoever
//! occupies them all keeps nobody out who answers at once.

use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Places for those who have proved nothing.
const UNPROVEN: usize = 32;
/// Places for those who have.
const PROVEN: usize = 1024;

/// Everybody who is connected.
#[derive(Debug, Default)]
pub(crate) struct Guests(Mutex<Places>);

#[derive(Debug, Default)]
struct Places {
    unproven: VecDeque<(u64, TcpStream)>,
    proven: HashMap<u64, TcpStream>,
    /// Those who were told to go may take a moment.
    num_inside: usize,
    next: u64,
    is_closed: bool,
}

/// A guest's place, free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    guests: Arc<Guests>,
    number: u64,
}

impl Guests {
    /// Lets somebody in; none when there is no room at all.
    pub(crate) fn admit(self: &Arc<Guests>, stream: &TcpStream) -> Option<Place> {
        let handle = stream.try_clone().ok()?;
        let mut places = self.places();
        if places.is_closed || places.num_inside >= 2 * UNPROVEN + PROVEN {
            return None;
        }
        if places.unproven.len() >= UNPROVEN
            && let Some((_, oldest)) = places.unproven.pop_front()
        {
            close(&oldest);
        }
        let number = places.next;
        places.next += 1;
        places.num_inside += 1;
        places.unproven.push_back((number, handle));
        Some(Place {
            guests: Arc::clone(self),
            number,
        })
    }

    /// Sends everybody away, and lets nobody in any more.
    pub(crate) fn close(&self) {
        let mut places = self.places();
        places.is_closed = true;
        places.unproven.iter().for_each(|(_, stream)| close(stream));
        places.proven.values().for_each(close);
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Moves to those who have proved themselves; whether there was room.
    pub(crate) fn prove(&self) -> bool {
        let mut places = self.guests.places();
        let own = |(number, _): &(u64, TcpStream)| *number == self.number;
        let Some(index) = places.unproven.iter().position(own) else {
            return false;
        };
        if places.proven.len() >= PROVEN {
            return false;
        }
        if let Some((number, stream)) = places.unproven.remove(index) {
            places.proven.insert(number, stream);
        }
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.guests.places();
        places.num_inside -= 1;
        places.proven.remove(&self.number);
        places.unproven.retain(|(number, _)| *number != self.number);
    }
}

/// One that is closed already needs no closing.
fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_longest_silent_goes_first_and_the_proven_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let guests = Arc::new(Guests::default());
        let mut outside = Vec::new();
        let mut inside = Vec::new();
        for index in 0..UNPROVEN + 3 {
            outside.push(TcpStream::connect(address).unwrap());
            let place = guests.admit(&listener.accept().unwrap().0).unwrap();
            assert!(index > 0 || place.prove());
            inside.push(place);
        }
        // The first had proved itself, so the second and the third had to go.
        for gone in &mut outside[1..3] {
            assert_eq!(gone.read(&mut [0]).unwrap(), 0);
        }
        assert!(!inside[1].prove());
        assert!(inside[3].prove());
        inside.clear();
        assert_eq!(guests.places().num_inside, 0);
        guests.close();
        assert!(guests.admit(&outside[0]).is_none());
    }
}
