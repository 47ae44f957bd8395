//! The design's invariants, looked up in the device's tables.

use super::layout::{NO_WAY, NONE};
use super::tables::HeadCopy;
use super::{CudaBackend, driver::Called};

impl CudaBackend {
    /// Copies every table to the host, after what is under way.
    pub(super) fn check_tables(&self, sequences: &[(u32, usize)]) -> Result<(), String> {
        let failed = |error: crate::Error| error.to_string();
        self.context.bind_to_thread().called("cuCtxSetCurrent").map_err(failed)?;
        self.engine.stream.synchronize().called("cuStreamSynchronize").map_err(failed)?;
        self.compute.synchronize().called("cuStreamSynchronize").map_err(failed)?;
        let mut owned = vec![false; self.staging.first];
        for &(sequence, tokens) in sequences {
            for (index, head) in self.tables.download(sequence).map_err(failed)?.iter().enumerate() {
                let context = |what: String| format!("sequence {sequence}, head {index}: {what}");
                let granted = self.tables.live(sequence).ways[index];
                if head.state.ways != granted {
                    return Err(context(format!("{} ways, but {granted} were granted", head.state.ways)));
                }
                // A step that has begun may have opened more.
                let pages = if self.open { head.state.pages as usize } else { self.geometry.pages(tokens) };
                head.check(pages, tokens % self.geometry.page_tokens() != 0).map_err(context)?;
                for &slot in &head.slots {
                    match owned.get_mut(slot as usize) {
                        Some(owned) if !*owned => *owned = true,
                        Some(_) => return Err(context(format!("slot {slot} is owned twice"))),
                        None => return Err(context(format!("slot {slot} is not in the pool"))),
                    }
                }
            }
        }
        Ok(())
    }
}

impl HeadCopy {
    /// Ways and pages name each other, and the open page is resident.
    fn check(&self, pages: usize, has_open_page: bool) -> Result<(), String> {
        if self.state.pages as usize != pages {
            return Err(format!("{} pages, but the tokens fill {pages}", self.state.pages));
        }
        for (way, &page) in self.pages.iter().enumerate().filter(|&(_, &page)| page != NONE) {
            match self.way_of_page.get(page as usize) {
                Some(entry) if entry & NO_WAY == way as u32 => {}
                _ => return Err(format!("way {way} holds page {page}, whose entry says otherwise")),
            }
            if self.stamps[way] == 0 {
                return Err(format!("way {way} holds page {page}, but was never used"));
            }
        }
        for (page, entry) in self.way_of_page.iter().enumerate() {
            let way = entry & NO_WAY;
            if way != NO_WAY && self.pages.get(way as usize) != Some(&(page as u32)) {
                return Err(format!("page {page} names way {way}, which holds another"));
            }
        }
        match self.way_of_page.last() {
            Some(entry) if has_open_page && entry & NO_WAY == NO_WAY => {
                Err("the open page is not on the device".into())
            }
            _ => Ok(()),
        }
    }
}
