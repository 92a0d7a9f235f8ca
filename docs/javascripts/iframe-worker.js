// A worker for pages that are opened from a disk, where browsers allow none: its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe")
    #loaded

    constructor(url) {
      super()
      this.#frame.hidden = true
      document.body.append(this.#frame)
      const inside = this.#frame.contentWindow
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.#loaded = new Promise(done => {
        const script = inside.document.createElement("script")
        script.src = new URL(url, document.baseURI)
        script.onload = done
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.#frame.remove()
    }
  }
}
