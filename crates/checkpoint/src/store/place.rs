//! Places as people write them: a path of this machine, or the URL of a bucket.

use std::path::{Path, PathBuf};

use crate::{CheckpointError, Result};

/// Where a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A folder of a file system.
    Folder(PathBuf),
    /// A part of a bucket.
    Bucket {
        /// The bucket's name.
        bucket: String,
        /// What the names of all its files begin with, without a `/` at either end.
        prefix: String,
    },
}

impl Place {
    /// Reads `folder/sub`, `file:///folder/sub` or `s3://bucket/prefix`.
    pub fn parse(place: &Path) -> Result<Place> {
        let refused = |reason: String| CheckpointError::Place {
            place: place.display().to_string(),
            reason,
        };
        let Some((scheme, rest)) = place.to_str().and_then(split_scheme) else {
            return Ok(Place::Folder(place.to_owned()));
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Place::Folder(rest.into())),
            "file" => Err(refused(
                "write file:///folder, with three slashes, or the path alone".to_owned(),
            )),
            "s3" => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                if bucket.is_empty() {
                    return Err(refused(
                        "it names no bucket: write s3://bucket/prefix".to_owned(),
                    ));
                }
                Ok(Place::Bucket {
                    bucket: bucket.to_owned(),
                    prefix: prefix.trim_matches('/').to_owned(),
                })
            }
            other => Err(refused(format!(
                "there is no {other}://: write a path, file:///folder or s3://bucket/prefix"
            ))),
        }
    }

    /// Reads a place; a path that is relative is under `folder`, a URL stands for itself.
    pub fn parse_under(folder: &Path, place: &Path) -> Result<Place> {
        match place.to_str().and_then(split_scheme) {
            Some(_) => Place::parse(place),
            None => Place::parse(&folder.join(place)),
        }
    }
}

/// The scheme of a URL, and what is behind it; none for what is no URL.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let is_ordinary = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic());
    (is_scheme && scheme.chars().all(is_ordinary)).then_some((scheme, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Place> {
        Place::parse(Path::new(text))
    }

    fn bucket(bucket: &str, prefix: &str) -> Place {
        Place::Bucket {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        }
    }

    #[test]
    fn paths_and_urls_are_told_apart() {
        for path in ["outputs/checkpoint", "/a/b", ".", "", "a:b", "a/s3://b"] {
            assert_eq!(parse(path).unwrap(), Place::Folder(path.into()));
        }
        assert_eq!(parse("file:///a/b").unwrap(), Place::Folder("/a/b".into()));
        assert_eq!(parse("s3://mine").unwrap(), bucket("mine", ""));
        assert_eq!(parse("s3://mine/a/b/").unwrap(), bucket("mine", "a/b"));
    }

    #[test]
    fn what_is_no_place_is_told() {
        let refusal = |text: &str| parse(text).unwrap_err().to_string();
        assert!(refusal("gs://mine/a").contains("there is no gs://"));
        assert!(refusal("gs://mine/a").contains("s3://bucket/prefix"));
        assert!(refusal("s3:///a").contains("no bucket"));
        assert!(refusal("file://a").contains("three slashes"));
    }

    #[test]
    fn urls_are_under_no_folder() {
        let under = |place: &str| Place::parse_under(Path::new("outputs"), Path::new(place));
        assert_eq!(under("a").unwrap(), Place::Folder("outputs/a".into()));
        assert_eq!(under("/a").unwrap(), Place::Folder("/a".into()));
        assert_eq!(under("s3://mine/a").unwrap(), bucket("mine", "a"));
    }
}
