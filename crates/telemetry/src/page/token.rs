//! The token that a browser must present: the page is served by HTTP, and every user of a host can reach its ports.

use std::fmt;
use std::io;

const NUM_BYTES: usize = 16;

/// A random token, in hexadecimal.
#[derive(Clone, Eq, PartialEq)]
pub(crate) struct Token(String);

impl Token {
    /// A new random token.
    pub(crate) fn random() -> io::Result<Token> {
        let mut bytes = [0; NUM_BYTES];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(Token(
            bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        ))
    }

    /// Whether the query of a request presents the token. How long it takes does not depend on which byte differs.
    pub(crate) fn is_in(&self, query: Option<&str>) -> bool {
        let parameters = query.unwrap_or_default().split('&');
        let presented = parameters.filter_map(|each| each.strip_prefix("token="));
        presented.into_iter().any(|presented| {
            let pairs = presented.bytes().zip(self.0.bytes());
            let difference = pairs.fold(0, |all, (a, b)| all | (a ^ b));
            presented.len() == self.0.len() && difference == 0
        })
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Not the token, which must not get into logs.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_accepted() -> io::Result<()> {
        let token = Token::random()?;
        assert_ne!(token, Token::random()?);
        let text = token.to_string();
        assert_eq!(text.len(), 2 * NUM_BYTES);
        assert!(token.is_in(Some(&format!("token={text}"))));
        assert!(token.is_in(Some(&format!("other=1&token={text}"))));
        assert!(!token.is_in(Some(&format!("token={}", &text[1..]))));
        assert!(!token.is_in(Some(&format!("token={text}0"))));
        assert!(!token.is_in(Some("token=")));
        assert!(!token.is_in(Some(&text)));
        assert!(!token.is_in(None));
        assert!(!format!("{token:?}").contains(&text));
        Ok(())
    }
}
