// Search in pages that are opened as files: browsers refuse workers there, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.started = new Promise((done) => this.frame.addEventListener("load", done, { once: true })).then(async () => {
        const inside = this.frame.contentWindow;
        const load = (each) =>
          new Promise((done, failed) => {
            const script = inside.document.createElement("script");
            Object.assign(script, { src: each, onload: done, onerror: failed });
            inside.document.head.append(script);
          });
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = async (...urls) => {
          for (const each of urls) await load(each);
        };
        await load(url);
        return inside;
      });
      document.documentElement.append(this.frame);
    }

    async postMessage(data) {
      (await this.started).dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
